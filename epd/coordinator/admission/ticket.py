"""One request in admission: who sent it, what it weighs, and how far it has come.

    preparing → waiting → given → ended
        └──────────┴─────────────→ ended

It is *preparing* while its body is read and its images are fetched, *waiting* in a queue, and
*given* once its work is with the workers. A transition not drawn here is a bug and raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from epd.auth import Caller
from epd.types import RequestClass, Stage

if TYPE_CHECKING:
    from epd.coordinator.admission.model_pools import ModelPools


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a request asks of each stage, in the tokens that routing weighs."""

    encode_tokens: int
    """Image tokens that no encode worker has cached."""
    prefill_tokens: int
    """Prompt tokens, images included, that no prefill worker has cached."""
    kv_tokens: int
    """KV that decode will hold, as far as is reserved for the answer."""

    def of(self, stage: Stage) -> int:
        """Tokens of one stage."""
        if stage is Stage.ENCODE:
            return self.encode_tokens
        return self.prefill_tokens if stage is Stage.PREFILL else self.kv_tokens


class TicketState(StrEnum):
    PREPARING = "preparing"
    WAITING = "waiting"
    GIVEN = "given"
    ENDED = "ended"


_NEXT: dict[TicketState, frozenset[TicketState]] = {
    TicketState.PREPARING: frozenset({TicketState.WAITING, TicketState.GIVEN, TicketState.ENDED}),
    TicketState.WAITING: frozenset({TicketState.GIVEN, TicketState.ENDED}),
    TicketState.GIVEN: frozenset({TicketState.ENDED}),
    TicketState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in admission, from its arrival to its end."""

    caller: Caller
    request_class: RequestClass
    number: int
    """Its turn among all arrivals."""
    state: TicketState = TicketState.PREPARING
    pools: ModelPools | None = None
    """Of its model; known once it is read, like its work."""
    work: StageWork = StageWork(0, 0, 0)
    num_images: int = 0
    """Not encoded yet."""
    held: list[Stage] = field(default_factory=list[Stage])
    """Stages that still have work of it to do, the next one first."""

    def enter(self, state: TicketState) -> None:
        """Move to `state`."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"ticket {self.number}: {self.state} → {state} is not allowed")
        self.state = state

    @property
    def lane(self) -> Lane:
        """Tickets of one lane need the same pools, so that if one has no room, none has."""
        assert self.pools is not None, "a ticket that waits has a model"
        return self.pools, self.work.encode_tokens > 0


Lane = tuple["ModelPools", bool]
"""A model, and whether its encode pool is needed."""
