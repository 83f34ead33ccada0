"""Whatever happens in whatever order: every ticket ends once, and nothing stays behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from epd.auth import Caller
from epd.config import AdmissionConfig, BatchConfig, InteractiveConfig, RequestConfig
from epd.coordinator.admission import Scheduler, StageWork, Ticket, TicketState
from epd.coordinator.admission.model_pools import ModelPools
from epd.errors import OverloadedError, RateLimitedError
from epd.types import RequestClass, Stage

MAX_QUEUE = 6
MAX_BATCH_QUEUE = 4
MAX_IN_FLIGHT = 14
CALLERS = [Caller("a"), Caller("b", weight=2.5), Caller("c", weight=0.1)]
tokens = st.integers(0, 3000)


class AnyOrder(RuleBasedStateMachine):
    """The gate's calls, in any order that it may make them in."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.scheduler = Scheduler(
            AdmissionConfig(
                interactive=InteractiveConfig(max_queue=MAX_QUEUE, max_backlog_s=0.5),
                batch=BatchConfig(max_queue=MAX_BATCH_QUEUE, max_backlog_s=0.2),
            ),
            RequestConfig(max_in_flight=MAX_IN_FLIGHT),
        )
        self.pools = [ModelPools(name, 0.0) for name in ("m", "n")]
        for pools in self.pools:
            for meter in pools.meters.values():
                meter.num_workers = 1
        self.live: set[Ticket] = set()
        self.waiting: set[Ticket] = set()
        self.given: set[Ticket] = set()

    @rule(target=tickets, caller=st.sampled_from(CALLERS), kind=st.sampled_from(RequestClass))
    def arrive(self, caller: Caller, kind: RequestClass):
        num_before = self.scheduler.num_tickets
        try:
            ticket, displaced = self.scheduler.arrive(caller, kind)
        except (OverloadedError, RateLimitedError) as error:
            assert error.retry_after_s is not None and error.retry_after_s >= 1
            queue_full = num_before >= MAX_BATCH_QUEUE
            assert queue_full, "nobody is refused while there is room"
            return multiple()
        if displaced is not None:
            victim, error = displaced
            assert victim in self.waiting, "only what waits makes way"
            is_of_batch = victim.request_class is RequestClass.BATCH
            assert is_of_batch or kind is RequestClass.INTERACTIVE, "batch displaces batch only"
            assert error.retry_after_s is not None
            self.waiting.remove(victim)
            self.live.remove(victim)
        self.live.add(ticket)
        return ticket

    @rule(ticket=tickets, model=st.integers(0, 1), encode=tokens, prefill=tokens)
    def ask(self, ticket: Ticket, model: int, encode: int, prefill: int) -> None:
        if ticket.state is TicketState.PREPARING:
            work = StageWork(encode, prefill, prefill + 100)
            given = self.scheduler.ask(self.now_s, ticket, self.pools[model], work)
            self.waiting.add(ticket)
            self.let(given)

    @rule(ticket=tickets, remaining_s=st.floats(-1, 5))
    def refuse_late(self, ticket: Ticket, remaining_s: float) -> None:
        if ticket.state is TicketState.WAITING:
            try:
                self.scheduler.refuse_late(ticket, remaining_s)
            except (OverloadedError, RateLimitedError):
                self.waiting.remove(ticket)
                self.live.remove(ticket)
                self.let(self.scheduler.advance(self.now_s))

    @rule(ticket=tickets, stage=st.sampled_from(Stage))
    def finish_stage(self, ticket: Ticket, stage: Stage) -> None:
        self.scheduler.finish_stage(self.now_s, ticket, stage)
        self.let(self.scheduler.advance(self.now_s))

    @rule(ticket=tickets)
    def leave(self, ticket: Ticket) -> None:
        """Its client leaves, its deadline passes, or it is answered."""
        self.scheduler.end(self.now_s, ticket)
        assert ticket.state is TicketState.ENDED
        for known in (self.live, self.waiting, self.given):
            known.discard(ticket)
        self.let(self.scheduler.advance(self.now_s))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.let(self.scheduler.advance(self.now_s))

    @rule(model=st.integers(0, 1), stage=st.sampled_from(Stage), num=st.integers(0, 3))
    def workers_come_and_go(self, model: int, stage: Stage, num: int) -> None:
        self.pools[model].meters[stage].num_workers = num
        self.let(self.scheduler.advance(self.now_s))

    def let(self, given: list[Ticket]) -> None:
        for ticket in given:
            assert ticket in self.waiting, "a ticket gets its turn once, and while it waits"
            assert ticket.state is TicketState.GIVEN
            self.waiting.remove(ticket)
            self.given.add(ticket)

    @invariant()
    def counts_agree(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_tickets == len(self.live) <= MAX_IN_FLIGHT
        assert scheduler.num_waiting == len(self.waiting)
        assert scheduler.num_given == len(self.given)
        for kind, limit in zip(RequestClass, (MAX_QUEUE, MAX_BATCH_QUEUE), strict=True):
            queued = [t for t in self.waiting if t.request_class is kind]
            assert len(scheduler.queues[kind]) == len(queued)
            assert len(queued) + scheduler.num_preparing[kind] <= limit

    @invariant()
    def tokens_agree(self) -> None:
        for pools in self.pools:
            for stage, meter in pools.meters.items():
                there = [t for t in self.given if t.pools is pools and stage in t.held]
                assert meter.tokens_given == sum(t.work.of(stage) for t in there)
                assert meter.num_given == len(there)
                assert meter.num_present == sum(t.held[0] is stage for t in there)
                waiting = [t for t in self.waiting if t.pools is pools]
                if stage is not Stage.DECODE:
                    queued = sum(q.tokens(pools, stage) for q in self.scheduler.queues.values())
                    assert queued == sum(t.work.of(stage) for t in waiting)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert not self.scheduler.advance(self.now_s), "whoever could go has gone"
        for pools in self.pools:
            is_idle = not any(meter.num_given for meter in pools.meters.values())
            assert not (is_idle and any(t.pools is pools for t in self.waiting))

    def teardown(self) -> None:
        for ticket in list(self.live):
            self.leave(ticket)
        assert self.scheduler.num_tickets == 0
        self.counts_agree()
        self.tokens_agree()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_an_illegal_transition_raises() -> None:
    ticket = Ticket(CALLERS[0], RequestClass.BATCH, 0)
    ticket.enter(TicketState.ENDED)
    for state in TicketState:
        with pytest.raises(RuntimeError, match="is not allowed"):
            ticket.enter(state)
