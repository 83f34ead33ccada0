"""Serving in simulated time: the coordinator's placement and the sim engine's timing."""
