"""How long a request will wait for its first token, as far as speeds are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epd.coordinator.admission.fair_queue import FairQueue
from epd.coordinator.admission.ticket import Ticket
from epd.types import RequestClass, Stage


@dataclass(frozen=True, slots=True)
class Wait:
    """An estimate; too low rather than too high, as it looks at the slowest stage only."""

    total_s: float
    """Until the first token."""
    without_others_s: float
    """The same, if no other tenant had anything waiting."""


def estimate_wait(ticket: Ticket, queues: Mapping[RequestClass, FairQueue]) -> Wait | None:
    """What the ticket that came last waits for; None unless a stage it needs is well measured."""
    assert ticket.pools is not None, "a ticket that waits has a model"
    queue = queues[ticket.request_class]
    waits: list[Wait] = []
    for stage in (Stage.ENCODE, Stage.PREFILL):
        meter, own = ticket.pools.meters[stage], ticket.work.of(stage)
        if not own or not meter.is_settled or not meter.capacity:
            continue
        # Its own is computed by one worker only.
        before = meter.tokens_given + own * (meter.num_workers - 1)
        if ticket.request_class is RequestClass.BATCH:
            before += queues[RequestClass.INTERACTIVE].tokens(ticket.pools, stage)
        mine = queue.tokens_of(ticket.caller, ticket.pools, stage)
        until = queue.tokens_until(ticket, stage)
        waits.append(Wait(meter.seconds(before + until), meter.seconds(before + mine)))
    return max(waits, key=lambda wait: wait.total_s, default=None)
