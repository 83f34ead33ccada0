"""Routing policies: pure functions from a snapshot of workers to the one that gets the work."""

from epd.pools.routing.least_loaded import Candidate, Policy, least_loaded

__all__ = ["Candidate", "Policy", "least_loaded"]
