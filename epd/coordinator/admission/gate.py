"""Where requests wait for their turn: the scheduler on an event loop.

Nothing is decided here. Each request enters, asks for its turn once it is read, and leaves; those
that wait have a future each, and a deadline. While any waits, the gate also looks by itself a few
times a second, as workers come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterable, Sequence
from functools import partial

from epd.auth import Caller
from epd.clock import Clock
from epd.config import ClassConfig, CoordinatorConfig, RequestConfig
from epd.coordinator.admission.model_pools import ModelPools
from epd.coordinator.admission.refusal import expired
from epd.coordinator.admission.request_class import class_of
from epd.coordinator.admission.scheduler import Scheduler
from epd.coordinator.admission.ticket import StageWork, Ticket, TicketState
from epd.coordinator.lifecycle import RequestRecord
from epd.errors import EPDError, NoWorkerError
from epd.observability.metrics import CoordinatorMetrics
from epd.pools.registry import Registry, Worker
from epd.types import RequestClass, Stage

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.25


class AdmissionGate:
    """Lets requests through, in order.

    Args:
        config: the classes, and the limits of all requests.
        clock: measures waits and speeds.
        registry: says how many workers there are.
        metrics: counts.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Clock,
        registry: Registry,
        metrics: CoordinatorMetrics,
    ) -> None:
        self.scheduler = Scheduler(config.admission, config.requests)
        self._clock = clock
        self._registry = registry
        self._metrics = metrics
        self._limits = {
            request_class: limits_of(config.requests, class_config)
            for request_class, class_config in self.scheduler.classes.items()
        }
        self._waits = {kind: metrics.admission_wait.labels(kind) for kind in RequestClass}
        self._pools: dict[str, ModelPools] = {}
        self._counted_s: dict[str, float] = {}
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def entered(
        self, record: RequestRecord, caller: Caller, wanted: str | None
    ) -> Generator[Ticket]:
        """Admit a request while the block runs; its class and deadlines are put on the record.

        Args:
            record: the request's.
            caller: who sends it.
            wanted: the class that it asks for.

        Raises:
            BadRequestError: there is no such class.
            ForbiddenError: the caller may not ask for it.
            RateLimitedError: the caller has as many requests waiting as is its share.
            OverloadedError: there are too many requests.
        """
        record.tenant = caller.name
        record.request_class = request_class = class_of(caller, wanted)
        record.limits = self._limits[request_class]
        try:
            ticket, displaced = self.scheduler.arrive(caller, request_class)
        except EPDError:
            self._metrics.rejected.labels(request_class, "queue_full").inc()
            raise
        if displaced is not None:
            self._displace(*displaced)
        try:
            yield ticket
        finally:
            self.scheduler.end(self._clock.monotonic(), ticket)
            self._advance()

    async def turn(
        self, ticket: Ticket, record: RequestRecord, work: StageWork, num_images: int
    ) -> None:
        """Wait until the request may be given to the workers.

        Args:
            ticket: the request's.
            record: the request's.
            work: what it asks of the workers.
            num_images: that it has.

        Raises:
            RateLimitedError: it would wait too long, or made way, for its own tenant's load.
            OverloadedError: it would wait too long, or made way.
            DeadlineError: its turn did not come in time.
        """
        now_s = self._clock.monotonic()
        ticket.num_images = num_images
        record.on_stage_done = partial(self._stage_done, ticket)
        self._let(self.scheduler.ask(now_s, ticket, self._pools_of(record.model_id, now_s), work))
        try:
            if ticket.state is TicketState.WAITING:
                await self._wait(ticket, record)
        finally:
            record.waited_s = self._clock.monotonic() - now_s
            self._waits[ticket.request_class].observe(record.waited_s)

    def queue_lengths(self) -> list[tuple[str, int]]:
        """Requests that wait, by class."""
        return [(name.value, len(queue)) for name, queue in self.scheduler.queues.items()]

    def backlogs(self) -> list[tuple[str, float]]:
        """Seconds of work given to a stage or waiting for it, of the model that has most."""
        return [
            (
                stage.value,
                max((self.scheduler.backlog_s(p, stage) for p in self._pools.values()), default=0),
            )
            for stage in (Stage.ENCODE, Stage.PREFILL)
        ]

    async def _wait(self, ticket: Ticket, record: RequestRecord) -> None:
        request_class, limits = ticket.request_class, self._limits[ticket.request_class]
        deadline_s = min(limits.first_token_s, limits.total_s)
        target_s = self.scheduler.classes[request_class].ttft_target_s or deadline_s
        elapsed_s = self._clock.monotonic() - record.created_s
        with self._counting_refusals(request_class, "too_late"):
            self.scheduler.refuse_late(ticket, target_s - elapsed_s)
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._look_later()
        try:
            with self._counting_refusals(request_class, "displaced"):
                async with asyncio.timeout(deadline_s - elapsed_s):
                    await turn
        except TimeoutError:
            self._metrics.rejected.labels(request_class, "deadline").inc()
            raise expired(deadline_s, self.scheduler.backlog_before(ticket)) from None
        finally:
            del self._turns[ticket]

    def _displace(self, ticket: Ticket, error: EPDError) -> None:
        turn = self._turns[ticket]
        if not turn.done():
            turn.set_exception(error)
            logger.info("a request of %s made way for another", ticket.caller.name)

    def _stage_done(self, ticket: Ticket, stage: Stage, num_images: int) -> None:
        if stage is Stage.ENCODE:
            ticket.num_images -= num_images
            if ticket.num_images > 0:
                return
        self.scheduler.finish_stage(self._clock.monotonic(), ticket, stage)
        self._advance()

    def _advance(self) -> None:
        self._let(self.scheduler.advance(self._clock.monotonic()))

    def _let(self, given: Iterable[Ticket]) -> None:
        for ticket in given:
            turn = self._turns.get(ticket)
            # Done already if its client has left just now; one that never waited has none.
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        now_s = self._clock.monotonic()
        for model_id in self._pools:
            self._pools_of(model_id, now_s)
        self._advance()
        if self.scheduler.num_waiting:
            self._look_later()

    def _pools_of(self, model_id: str, now_s: float) -> ModelPools:
        """The pools of a model, with their workers counted lately."""
        pools = self._pools.get(model_id)
        if pools is None:
            pools = self._pools[model_id] = ModelPools(model_id, now_s)
        if now_s - self._counted_s.get(model_id, float("-inf")) >= _LOOK_AGAIN_S / 2:
            self._counted_s[model_id] = now_s
            for stage, meter in pools.meters.items():
                workers = self._ready(stage, model_id)
                meter.num_workers = len(workers)
                meter.capacity_tokens = sum(w.report.load.max_total_num_tokens for w in workers)
        return pools

    def _ready(self, stage: Stage, model_id: str) -> Sequence[Worker]:
        try:
            return self._registry.ready(stage, model_id)
        except NoWorkerError:
            return ()

    @contextlib.contextmanager
    def _counting_refusals(self, request_class: RequestClass, reason: str) -> Generator[None]:
        try:
            yield
        except EPDError:
            self._metrics.rejected.labels(request_class, reason).inc()
            raise


def limits_of(requests: RequestConfig, config: ClassConfig) -> RequestConfig:
    """What holds for all requests, with the deadlines of a class."""
    deadlines = {"first_token_s": config.first_token_s, "total_s": config.total_s}
    return requests.model_copy(update={k: v for k, v in deadlines.items() if v is not None})
