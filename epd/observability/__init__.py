"""Logs, metrics and timelines."""
