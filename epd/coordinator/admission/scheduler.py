"""Decides who goes, who waits and who is refused; pure, told what happens and when.

- While a stage has room, and nothing waits for it, a request is given to it at once.
- Interactive goes first; batch goes only while no interactive request for its model waits.
- Within a class tenants have fair shares (`fair_queue`), and where there is no room left to wait,
  the tenant that takes most of it gives way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from itertools import count

from epd.auth import ANONYMOUS, Caller
from epd.config import AdmissionConfig, ClassConfig, RequestConfig
from epd.coordinator.admission.estimate import estimate_wait
from epd.coordinator.admission.fair_queue import FairQueue
from epd.coordinator.admission.model_pools import ModelPools
from epd.coordinator.admission.refusal import (
    full_house,
    full_queue,
    full_share,
    hopeless,
    made_way,
    made_way_for_interactive,
)
from epd.coordinator.admission.stage_meter import StageMeter
from epd.coordinator.admission.ticket import Lane, StageWork, Ticket, TicketState
from epd.errors import EPDError
from epd.types import RequestClass, Stage

_KEPT_PART = 16


class Scheduler:
    """All tickets that have not ended.

    Args:
        config: the classes.
        requests: what holds for requests of all classes.
    """

    def __init__(self, config: AdmissionConfig, requests: RequestConfig) -> None:
        self.classes: Mapping[RequestClass, ClassConfig] = {
            RequestClass.INTERACTIVE: config.interactive,
            RequestClass.BATCH: config.batch,
        }
        self.queues = {request_class: FairQueue() for request_class in RequestClass}
        self.num_preparing = dict.fromkeys(RequestClass, 0)
        self.num_waiting = 0
        self.num_given = 0
        self.num_tickets = 0
        """Of requests that have not ended."""
        self._num_by_tenant = Counter[str]()
        self._max_in_flight = requests.max_in_flight
        self._numbers = count()
        self._held: set[StageMeter] = set()

    def arrive(
        self, caller: Caller, request_class: RequestClass
    ) -> tuple[Ticket, tuple[Ticket, EPDError] | None]:
        """A request has come.

        Returns: its ticket, and that of a request which made way for it, if one did: it has ended,
        with the error that its client is to be told.

        Raises:
            RateLimitedError: its tenant has its share of the queue already.
            OverloadedError: there are too many requests.
        """
        displaced = self._make_room(caller, request_class)
        self.num_preparing[request_class] += 1
        self.num_tickets += 1
        self._num_by_tenant[caller.name] += 1
        return Ticket(caller, request_class, next(self._numbers)), displaced

    def ask(self, now_s: float, ticket: Ticket, pools: ModelPools, work: StageWork) -> list[Ticket]:
        """A request is ready for its turn. Returns the tickets given now, it among them or not.

        Args:
            now_s: monotonic time.
            ticket: the request's.
            pools: its model's.
            work: what it asks of them.
        """
        ticket.pools, ticket.work = pools, work
        if not self.num_waiting and not self._blocking(ticket):
            self._give(now_s, ticket)
            return [ticket]
        ticket.enter(TicketState.WAITING)
        self.num_preparing[ticket.request_class] -= 1
        self.queues[ticket.request_class].push(ticket)
        self.num_waiting += 1
        return self.advance(now_s)

    def refuse_late(self, ticket: Ticket, remaining_s: float) -> None:
        """End a ticket that has just begun to wait if its first token would come too late.

        Args:
            ticket: the last that came.
            remaining_s: until the target for its first token.

        Raises:
            RateLimitedError: it would come too late behind its own tenant's requests alone.
            OverloadedError: it would come too late.
        """
        wait = estimate_wait(ticket, self.queues)
        if wait is not None and wait.total_s > remaining_s:
            self._drop(ticket)
            raise hopeless(ticket, wait, remaining_s)

    def finish_stage(self, now_s: float, ticket: Ticket, stage: Stage) -> None:
        """A stage, and with it those before it, has done its work for a request."""
        while stage in ticket.held:
            self._leave_stage(now_s, ticket, is_done=True)

    def end(self, now_s: float, ticket: Ticket) -> None:
        """A request has ended, wherever it was; further calls do nothing."""
        if ticket.state is TicketState.ENDED:
            return
        if ticket.state is TicketState.WAITING:
            self._drop(ticket)
            return
        if ticket.state is TicketState.PREPARING:
            self.num_preparing[ticket.request_class] -= 1
        else:
            while ticket.held:
                self._leave_stage(now_s, ticket, is_done=False)
            self.num_given -= 1
        self._forget(ticket)

    def advance(self, now_s: float) -> list[Ticket]:
        """Give all that have room now, in order; called whenever something may have changed."""
        given: list[Ticket] = []
        held: dict[StageMeter, RequestClass] = {}
        if not (self.num_waiting or self._held):
            return given
        for request_class, queue in self.queues.items():
            reserved = self._reserved_from(request_class)
            full: set[_Pool] = set()
            while ticket := queue.first(lambda lane, full=full | reserved: _needs_one(lane, full)):
                assert ticket.pools is not None, "a ticket that waits has a model"
                if blocking := self._blocking(ticket):
                    full.update((ticket.pools, stage) for stage in blocking)
                else:
                    self._give(now_s, ticket)
                    given.append(ticket)
            for pools, stage in full:
                held.setdefault(pools.meters[stage], request_class)
        self._hold(now_s, held)
        return given

    def backlog_s(self, pools: ModelPools, stage: Stage) -> float:
        """Seconds of work that a stage has been given or that waits for it."""
        waiting = sum(queue.tokens(pools, stage) for queue in self.queues.values())
        meter = pools.meters[stage]
        return meter.seconds(meter.tokens_given + waiting)

    def backlog_before(self, ticket: Ticket) -> float:
        """Seconds until all that wait for a ticket's model are through; 0 if that is not known."""
        assert ticket.pools is not None, "a ticket that waits has a model"
        return max(self.backlog_s(ticket.pools, stage) for stage in (Stage.ENCODE, Stage.PREFILL))

    def _make_room(
        self, caller: Caller, request_class: RequestClass
    ) -> tuple[Ticket, EPDError] | None:
        queue = self.queues[request_class]
        num = self.num_preparing[request_class] + len(queue)
        is_queue_full = num >= self.classes[request_class].max_queue
        if not is_queue_full and self.num_tickets < self._max_in_flight - self._num_kept(caller):
            return None
        batch = self.queues[RequestClass.BATCH].newest_of_heaviest()
        if batch and not is_queue_full and request_class is RequestClass.INTERACTIVE:
            return self._drop(batch[0]), made_way_for_interactive(self.backlog_before(batch[0]))
        heaviest = queue.newest_of_heaviest()
        backlog_s = self.backlog_before(heaviest[0]) if heaviest else None
        num_own = queue.num_of(caller)
        if heaviest and heaviest[1] > (num_own + 1) / caller.weight:
            return self._drop(heaviest[0]), made_way(heaviest[0], backlog_s)
        if not is_queue_full and self.num_tickets < self._max_in_flight:
            raise full_share(self._num_by_tenant[caller.name], backlog_s)
        if is_queue_full:
            raise full_queue(request_class, num, backlog_s, is_own_load=num_own > 0)
        raise full_house(self._max_in_flight, backlog_s)

    def _num_kept(self, caller: Caller) -> int:
        """Places kept from a tenant that has more than half of them, for others.

        Its requests may be with the workers already, where they cannot make way.
        """
        if caller is ANONYMOUS or 2 * self._num_by_tenant[caller.name] <= self._max_in_flight:
            return 0
        return self._max_in_flight // _KEPT_PART

    def _reserved_from(self, request_class: RequestClass) -> set[_Pool]:
        """Pools that batch gets nothing of, as interactive requests wait for their model."""
        if request_class is RequestClass.INTERACTIVE:
            return set()
        models = self.queues[RequestClass.INTERACTIVE].models()
        return {(pools, stage) for pools in models for stage in Stage}

    def _blocking(self, ticket: Ticket) -> list[Stage]:
        """The stages that have no room for a ticket."""
        assert ticket.pools is not None, "a ticket that asks has a model"
        request_class, pools, work = ticket.request_class, ticket.pools, ticket.work
        config = self.classes[request_class]
        stages = _needed(ticket.lane)
        return [s for s in stages if pools.is_full(s, work, request_class, config)]

    def _give(self, now_s: float, ticket: Ticket) -> None:
        pools, queue = ticket.pools, self.queues[ticket.request_class]
        assert pools is not None, "a ticket that is given has a model"
        queue.charge(ticket.caller, pools.cost_s(ticket.work))
        if ticket.state is TicketState.WAITING:
            queue.remove(ticket)
            self.num_waiting -= 1
        else:
            self.num_preparing[ticket.request_class] -= 1
        ticket.enter(TicketState.GIVEN)
        self.num_given += 1
        ticket.held = list(_needed(ticket.lane))
        for stage in ticket.held:
            pools.meters[stage].give(now_s, ticket.request_class, ticket.work.of(stage))
        pools.meters[ticket.held[0]].start(now_s)

    def _leave_stage(self, now_s: float, ticket: Ticket, *, is_done: bool) -> None:
        """The first of the stages that a ticket holds is no longer held."""
        assert ticket.pools is not None, "a ticket that is given has a model"
        stage = ticket.held.pop(0)
        ticket.pools.meters[stage].take_back(
            now_s,
            ticket.request_class,
            ticket.work.of(stage),
            is_done=is_done,
        )
        if ticket.held:
            ticket.pools.meters[ticket.held[0]].start(now_s)

    def _drop(self, ticket: Ticket) -> Ticket:
        """A ticket that waits does so no more, and has ended."""
        self.queues[ticket.request_class].remove(ticket)
        self.num_waiting -= 1
        self._forget(ticket)
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        ticket.enter(TicketState.ENDED)
        self.num_tickets -= 1
        self._num_by_tenant[ticket.caller.name] -= 1

    def _hold(self, now_s: float, held: Mapping[StageMeter, RequestClass]) -> None:
        """Tell the meters for which of them requests are held back."""
        for meter in self._held - held.keys():
            meter.hold(now_s, None)
        for meter, request_class in held.items():
            meter.hold(now_s, request_class)
        self._held = set(held)


_Pool = tuple[ModelPools, Stage]
_TEXT = (Stage.PREFILL, Stage.DECODE)


def _needed(lane: Lane) -> tuple[Stage, ...]:
    """The stages that work for tickets of a lane, in order."""
    return tuple(Stage) if lane[1] else _TEXT


def _needs_one(lane: Lane, pools: Set[_Pool]) -> bool:
    return any((lane[0], stage) in pools for stage in _needed(lane))
