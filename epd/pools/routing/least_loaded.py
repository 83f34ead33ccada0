"""Least loaded: the worker with the fewest tokens ahead of a new request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of a worker."""

    worker_id: str
    tokens_in_flight: int
    """Tokens of requests this coordinator has placed there and that have not ended."""
    num_in_flight: int
    num_placed: int
    """Requests ever placed there by this coordinator."""


Policy = Callable[[Sequence[Candidate]], Candidate]
"""Picks one of at least one candidate."""


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Choose the candidate with the fewest tokens, then requests, in flight.

    Ties go to the one that was given the least so far, so an idle pool is used evenly and not
    always from its first member (vllm#52484).

    Args:
        candidates: at least one.
    """
    return min(
        candidates,
        key=lambda c: (c.tokens_in_flight, c.num_in_flight, c.num_placed, c.worker_id),
    )
