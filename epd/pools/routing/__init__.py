"""Routing policies: pure functions from a snapshot of workers to the one that gets the work."""

from epd.pools.routing.links import HandOff, LinkCosts, Place, place_of, total_cost
from epd.pools.routing.prefix_index import Block, PrefixIndex
from epd.pools.routing.snapshot import Candidate, Choice, Policy, Snapshot, Work
from epd.pools.routing.table import POLICIES, policy_of

__all__ = [
    "POLICIES",
    "Block",
    "Candidate",
    "Choice",
    "HandOff",
    "LinkCosts",
    "Place",
    "Policy",
    "PrefixIndex",
    "Snapshot",
    "Work",
    "place_of",
    "policy_of",
    "total_cost",
]
