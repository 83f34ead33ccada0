"""A fleet in simulated time, driven by the scheduler alone: each worker is a first-come queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from epd.auth import ANONYMOUS, Caller
from epd.config import AdmissionConfig, RequestConfig
from epd.coordinator.admission import Scheduler, StageWork, Ticket, TicketState
from epd.coordinator.admission.model_pools import ModelPools
from epd.errors import EPDError
from epd.types import RequestClass, Stage

DECODE_S = 0.05
_COMPUTING = (Stage.ENCODE, Stage.PREFILL)


@dataclass
class Request:
    caller: Caller
    request_class: RequestClass
    work: StageWork
    arrived_s: float
    ticket: Ticket | None = None
    given_s: float | None = None
    first_token_s: float | None = None
    error: EPDError | None = None
    on_first_token: Callable[[], None] = lambda: None

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None, f"no first token: {self.error}"
        return self.first_token_s - self.arrived_s


@dataclass
class _Worker:
    tokens_per_s: float
    queue: deque[Request] = field(default_factory=deque)
    is_busy: bool = False
    tokens: int = 0
    """That are queued or at work."""


class SimulatedFleet:
    """Workers of one model behind a scheduler.

    Args:
        workers: (number, tokens/s of one) by stage.
        target_s: of the time to first token.
        kv_tokens: of all decode workers.
    """

    def __init__(
        self,
        *,
        workers: dict[Stage, tuple[int, float]],
        config: AdmissionConfig | None = None,
        requests: RequestConfig | None = None,
        target_s: float = 60.0,
        kv_tokens: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(config or AdmissionConfig(), requests or RequestConfig())
        self.pools = ModelPools("m", 0.0)
        self.target_s = target_s
        self.workers = {
            stage: [_Worker(speed) for _ in range(num)] for stage, (num, speed) in workers.items()
        }
        for stage, (num, _) in workers.items():
            self.pools.meters[stage].num_workers = num
        self.pools.meters[Stage.DECODE].num_workers = 1
        self.pools.meters[Stage.DECODE].capacity_tokens = kv_tokens
        self.requests: list[Request] = []
        self._by_ticket: dict[Ticket, Request] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), do))

    def run(self, until_s: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()

    def send(
        self,
        work: StageWork,
        *,
        caller: Caller = ANONYMOUS,
        request_class: RequestClass = RequestClass.INTERACTIVE,
    ) -> Request:
        """A request arrives now."""
        request = Request(caller, request_class, work, self.now_s)
        self.requests.append(request)
        try:
            ticket, displaced = self.scheduler.arrive(caller, request_class)
            if displaced:
                self._by_ticket[displaced[0]].error = displaced[1]
            request.ticket = ticket
            self._by_ticket[ticket] = request
            self._let(self.scheduler.ask(self.now_s, ticket, self.pools, work))
            if ticket.state is TicketState.WAITING:
                self.scheduler.refuse_late(ticket, self.target_s)
        except EPDError as error:
            request.error = error
        return request

    def _let(self, given: list[Ticket]) -> None:
        for ticket in given:
            request = self._by_ticket[ticket]
            assert request.given_s is None, "a ticket is given once"
            request.given_s = self.now_s
            self._go_to(ticket.held[0], request)

    def _go_to(self, stage: Stage, request: Request) -> None:
        if stage is Stage.DECODE:
            request.first_token_s = self.now_s
            request.on_first_token()
            self.at(self.now_s + DECODE_S, lambda: self._end(request))
            return
        worker = min(self.workers[stage], key=lambda w: w.tokens)
        worker.queue.append(request)
        worker.tokens += request.work.of(stage)
        self._work(stage, worker)

    def _work(self, stage: Stage, worker: _Worker) -> None:
        if worker.is_busy or not worker.queue:
            return
        worker.is_busy = True
        request = worker.queue.popleft()
        took_s = request.work.of(stage) / worker.tokens_per_s
        self.at(self.now_s + took_s, lambda: self._done(stage, worker, request))

    def _done(self, stage: Stage, worker: _Worker, request: Request) -> None:
        assert request.ticket is not None
        worker.is_busy = False
        worker.tokens -= request.work.of(stage)
        self.scheduler.finish_stage(self.now_s, request.ticket, stage)
        self._go_to(request.ticket.held[0], request)
        self._work(stage, worker)
        self._let(self.scheduler.advance(self.now_s))

    def _end(self, request: Request) -> None:
        assert request.ticket is not None
        self.scheduler.end(self.now_s, request.ticket)
        self._let(self.scheduler.advance(self.now_s))
