"""What a routing policy is told, and what it answers.

A snapshot holds all a policy may know of one piece of work and of the workers it could go to; it
does not change. `epd.pools.router` makes it from live workers, the simulator from its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Candidate(NamedTuple):
    """A worker that may be given the work. A tuple, since 64 dataclasses would cost 0.1 ms."""

    worker_id: str
    num_in_flight: int = 0
    """Pieces of work this coordinator has placed there and that have not ended."""
    tokens_in_flight: int = 0
    """Their tokens: to encode, to prefill, or of KV, grown as far as is reserved for it."""
    last_turn: int = 0
    """Number of the choice that last fell on it; 0 if none has."""
    hit_tokens: int = 0
    """Tokens of this work, if not all, that it has in its cache and need not compute."""
    link_tokens: float = 0.0
    """What the hand-offs of this work cost there, in tokens computed in the same time."""
    num_running: int = 0
    """Requests it reported to run or to queue."""
    num_used_tokens: int = 0
    """KV tokens it reported to hold."""
    max_total_num_tokens: int = 0
    """KV tokens it has room for; 0 if it did not say."""
    done_tokens: int = 0
    """Prefill: of the tokens in flight, those it must have computed by now, as it does prompts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be placed: an image part, a prefill or a decode."""

    num_tokens: int
    """Image tokens to encode, prompt tokens to prefill, or prompt tokens whose KV is taken over."""
    growth_tokens: int = 0
    """Decode: KV tokens to reserve for the answer."""
    key: str = ""
    """Equal for equal content; what affinity hashes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The work, and at least one candidate, in any order."""

    work: Work
    candidates: tuple[Candidate, ...]
    lot: float = 0.0
    """Drawn from [0, 1) for this choice, so that a policy that draws lots is pure too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the candidates, and why, for the request's timeline."""

    candidate: Candidate
    reason: str

    @property
    def worker_id(self) -> str:
        return self.candidate.worker_id


Policy = Callable[[Snapshot], Choice]
"""Pure: equal snapshots give equal choices, whatever the order of the candidates."""
