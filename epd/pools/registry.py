"""The registry of workers: soft state, learned from their reports and kept under leases.

It owns which workers exist and in what state. It starts no processes and sends no requests: the
coordinator's HTTP layer feeds it reports, the dispatcher asks it for ready workers and tells it
about refused connections. A restarted coordinator is whole again after one heartbeat of each
worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from yarl import URL

from epd.clock import Clock, SystemClock
from epd.config import BreakerConfig
from epd.errors import BadRequestError, NoWorkerError, UnknownModelError, WorkerError
from epd.pools.breaker import Breaker
from epd.pools.progress import Piece, Progress
from epd.pools.routing import Place, place_of
from epd.types import Stage, WorkerId, WorkerState
from epd.wire import ModelCard, WorkerReport

logger = logging.getLogger(__name__)

_FORGET_AFTER_S = 600.0


class Worker:
    """One life of one worker process: a worker id and an epoch."""

    def __init__(
        self,
        report: WorkerReport,
        now_s: float,
        breaker: Breaker | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.worker_id = WorkerId(report.worker_id)
        self.report = report
        self.state = report.state
        self.seen_s = now_s
        self.breaker = breaker or Breaker()
        self._clock = clock or SystemClock()
        self._progress = Progress()
        self.lost = asyncio.Event()
        """Set once this life is over; whoever waits on the worker stops waiting."""
        self.fate = "is lost"
        """How this life ended, to follow the worker's name in a sentence."""
        self.progress_s = now_s
        """When it last answered a request, or with a part of an answer."""
        self.num_in_flight = 0
        """Requests this coordinator has given the worker and not seen end."""
        self.tokens_in_flight = 0
        self.num_placed = 0
        self.last_turn = 0
        """Number of its router's choice that last fell on it."""
        self.place: Place = place_of(report.labels, URL(report.url).host or "")

    @property
    def stage(self) -> Stage:
        return self.report.stage

    @property
    def url(self) -> str:
        return self.report.url

    def __str__(self) -> str:
        return f"{self.stage} worker {self.worker_id}"

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known against this life: it reports, and takes connections."""
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def loss(self) -> WorkerError:
        """The error for whoever still needed this life of the worker."""
        return WorkerError(f"{self} {self.fate}")

    @property
    def done_tokens(self) -> int:
        """Of the tokens in flight, those that must be computed by now.

        0 where several are computed at once, or stay: in encode and decode.
        """
        if self.stage is not Stage.PREFILL:
            return 0
        return self._progress.done_tokens(self._clock.monotonic())

    @contextmanager
    def carrying(self, tokens: int) -> Generator[Piece]:
        """Count a request of `tokens` tokens as in flight here while the block runs.

        Say by `is_done` of what is given if the worker has done what it should, so that its speed
        is known.
        """
        self.num_in_flight += 1
        self.num_placed += 1
        self.tokens_in_flight += tokens
        piece = self._progress.begin(tokens, self._clock.monotonic())
        try:
            yield piece
        finally:
            self._progress.end(piece, self._clock.monotonic())
            self.num_in_flight -= 1
            self.tokens_in_flight -= tokens


class Registry:
    """All workers known to this coordinator, by id."""

    def __init__(
        self, clock: Clock, *, lease_s: float, breaker: BreakerConfig | None = None
    ) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._breaker = breaker or BreakerConfig()
        self._workers: dict[WorkerId, Worker] = {}
        self._is_closed = False
        self._on_end: list[Callable[[Worker], None]] = []

    def on_end(self, call: Callable[[Worker], None]) -> None:
        """Have `call` told of each worker whose life has ended, and with it all that it held."""
        self._on_end.append(call)

    def report(self, report: WorkerReport) -> None:
        """Take a worker's report: a registration, a heartbeat, or a farewell (state gone).

        Raises:
            BadRequestError: the report is of an older life of the worker than the known one, whose
                lease holds. A lapsed one does not count: clocks are sometimes set back.
        """
        if self._is_closed:
            return
        now_s = self._clock.monotonic()
        worker_id = WorkerId(report.worker_id)
        known = self._workers.get(worker_id)
        is_taken = known is not None and not known.lost.is_set()
        if known is not None and is_taken and report.epoch < known.report.epoch:
            raise BadRequestError(
                f"worker_id {worker_id} is taken by a worker that started later: "
                "give each worker its own --worker-id",
                param="epoch",
            )
        if known is not None and (report.epoch > known.report.epoch or known.lost.is_set()):
            # Whatever ran on the earlier life, or before the lease lapsed, has been failed.
            self._end(known, WorkerState.LOST, "was started anew")
            known = None
        if known is None:
            if report.state is WorkerState.GONE:
                self._workers.pop(worker_id, None)
                return
            known = self._workers[worker_id] = Worker(
                report, now_s, Breaker(self._breaker), self._clock
            )
            self._log(known, f"{known} joined ({report.engine}, {report.url})")
        known.seen_s = now_s
        known.report = report
        if known.state is not report.state:
            self._log(known, f"{known}: {known.state} → {report.state}")
        known.state = report.state
        if report.state is WorkerState.GONE:
            self._end(known, WorkerState.GONE, "has left")
            del self._workers[worker_id]

    def suspect(self, worker: Worker) -> None:
        """A connection to the worker was refused or broke: no new work until it reports again."""
        if worker.state in (WorkerState.READY, WorkerState.STARTING):
            worker.state = WorkerState.SUSPECT
            self._log(worker, f"{worker} is suspect: a connection to it failed")

    def failed(self, worker: Worker) -> None:
        """The worker answered, wrongly; after several in a row it is left alone for a while."""
        if worker.breaker.failed(self._clock.monotonic()):
            self._log(worker, f"{worker} keeps failing: it gets no work for a while")

    def hung(self, worker: Worker) -> None:
        """The worker reports to be well, and answers nothing: it is left alone for a while."""
        if worker.breaker.failed(self._clock.monotonic(), is_hung=True):
            self._log(worker, f"{worker} hangs: it gets no work for a while")

    def succeeded(self, worker: Worker) -> None:
        """The worker did what it was asked to."""
        was_closed = worker.breaker.is_closed
        worker.progress_s = self._clock.monotonic()
        worker.breaker.succeeded(worker.progress_s)
        if worker.breaker.is_closed and not was_closed:
            self._log(worker, f"{worker} works again")

    def expire(self) -> None:
        """Declare workers lost whose lease has lapsed; called at least once a heartbeat."""
        now_s = self._clock.monotonic()
        for worker_id, worker in list(self._workers.items()):
            silence_s = now_s - worker.seen_s
            if silence_s > self._lease_s and not worker.lost.is_set():
                self._log(worker, f"{worker} is lost: silent for {silence_s:.1f} s")
                self._end(worker, WorkerState.LOST, "vanished: its lease has lapsed")
            if silence_s > _FORGET_AFTER_S:
                del self._workers[worker_id]

    def forgive(self, deaf_s: float) -> None:
        """Extend every lease by the seconds in which this process took no reports.

        After a stall the reports of all workers are still unread: without this, all would be lost.
        """
        now_s = self._clock.monotonic()
        for worker in self._workers.values():
            worker.seen_s = min(worker.seen_s + deaf_s, now_s)

    def close(self) -> None:
        """End every worker's life for good, so that nothing waits on one any more."""
        self._is_closed = True
        for worker in self._workers.values():
            self._end(worker, WorkerState.LOST, "was given up: the coordinator is shutting down")

    def all(self) -> list[Worker]:
        """Every known worker, the lost ones too, by stage and id."""
        order = list(Stage)
        return sorted(self._workers.values(), key=lambda w: (order.index(w.stage), w.worker_id))

    def ready(self, stage: Stage, model_id: str) -> list[Worker]:
        """The workers of `stage` that may be given work for `model_id`.

        Raises:
            NoWorkerError: there is none; the message names the stage.
        """
        self.expire()
        found = [
            worker
            for worker in self._workers.values()
            if worker.stage is stage
            and worker.state is WorkerState.READY
            and worker.report.model.model_id == model_id
        ]
        if not found:
            raise NoWorkerError(
                f"no {stage} worker is ready for model {model_id!r}; retry when one is back",
                retry_after_s=max(1.0, self._lease_s / 2),
            )
        now_s = self._clock.monotonic()
        admitted = [w for w in found if w.breaker.admits(now_s, is_idle=not w.num_in_flight)]
        # Where all fail, the fault is hardly theirs, and refusing everything would not mend it.
        return admitted or found

    def model(self, model_id: str) -> ModelCard:
        """The card of a served model.

        Raises:
            UnknownModelError: workers are known, but none of them serves it.
            NoWorkerError: no worker is known at all, so nothing can be said about models.
        """
        cards = {worker.report.model.model_id: worker.report.model for worker in self.all()}
        if model_id in cards:
            return cards[model_id]
        if not cards:
            raise NoWorkerError(
                "no encode, prefill or decode worker has registered yet; retry when they are up",
                retry_after_s=max(1.0, self._lease_s / 2),
            )
        served = ", ".join(sorted(cards))
        raise UnknownModelError(
            f"model {model_id!r} is not served here; served: {served}", param="model"
        )

    def missing_stages(self) -> list[Stage]:
        """Stages without a ready worker (of any model)."""
        self.expire()
        present = {w.stage for w in self._workers.values() if w.state is WorkerState.READY}
        return [stage for stage in Stage if stage not in present]

    def _end(self, worker: Worker, state: WorkerState, fate: str) -> None:
        if not worker.lost.is_set():
            worker.state = state
            worker.fate = fate
            worker.lost.set()
            for call in self._on_end:
                call(worker)

    def _log(self, worker: Worker, message: str) -> None:
        logger.info(message, extra={"worker_id": worker.worker_id, "stage": worker.stage})
