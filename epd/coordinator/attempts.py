"""The attempts at one request: each on a pair of workers, until one of them answers.

While nothing of the answer has reached the client, a request whose worker failed is sent to others,
under a new id and in a new room, so that what the failed attempt left behind cannot meet it. Whose
fault a failure is decides who is left out the next time:

- A worker that is gone, hangs, or told of an error of its own, is left out.
- One that only complains of a peer (a hand-off that failed) may itself be at fault: both are left
  out if there are others, else one of the two.
- Nobody is, and nothing is tried again, if the client asked wrongly, or no worker can encode an
  image: the encode gateway has tried others already.

What a dead or hung worker leaves is moved at once; other retries wait for room in the retry budget.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from epd.clock import Clock
from epd.config import CoordinatorConfig
from epd.coordinator.client import WorkerClient
from epd.coordinator.dispatch import Dispatch, Pair, Sink
from epd.coordinator.encode_gateway import EncodeGateway
from epd.coordinator.lifecycle import RequestRecord, RequestState, attempt_id
from epd.coordinator.pair_placement import PairPlacement, PlacedPair
from epd.coordinator.request_body import WorkerBody
from epd.coordinator.retry_budget import RetryBudget
from epd.errors import (
    ContextLengthError,
    DeadlineError,
    EPDError,
    NoWorkerError,
    TransferError,
    UnreachableError,
    WorkerError,
)
from epd.observability.metrics import CoordinatorMetrics
from epd.pools.registry import Registry, Worker
from epd.pools.routing import Block
from epd.types import RequestId, Room

logger = logging.getLogger(__name__)

# What a worker says when something between it and a peer went wrong.
_OF_A_PEER = (TransferError, UnreachableError, DeadlineError)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done for a request, whoever does it."""

    model_id: str
    body: WorkerBody
    is_stream: bool
    max_new_tokens: int | None
    blocks: Sequence[Block]
    """Its prompt."""
    image_tokens: dict[str, int]
    """By content hash."""
    num_image_tokens: int
    """Of all images; one may be there twice."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt failed, and what follows from it."""

    error: EPDError
    leave_out: Sequence[set[Worker]] = ()
    """Whom to leave out the next time, the best choice first; empty if there is no next time."""
    is_of_the_dead: bool = False


class Attempts:
    """Carries requests out, on other workers where the first fail."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Clock,
        registry: Registry,
        client: WorkerClient,
        gateway: EncodeGateway,
        pairs: PairPlacement,
        metrics: CoordinatorMetrics,
        num_in_flight: Callable[[], int],
        mint_room: Callable[[], Room],
        in_background: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        """Wire the parts together.

        Args:
            num_in_flight: how many requests are in flight now, for the retry budget.
            mint_room: gives a room no other attempt has.
            in_background: runs what nobody waits for.
        """
        self._limits = config.requests
        self._max_attempts = config.retry.max_attempts
        self._hang_s = config.retry.hang_s
        self._budget = RetryBudget(config.retry, num_in_flight)
        self._clock = clock
        self._registry = registry
        self._client = client
        self._gateway = gateway
        self._pairs = pairs
        self._metrics = metrics
        self._mint_room = mint_room
        self._in_background = in_background

    async def run(self, record: RequestRecord, job: Job, sink: Sink) -> None:
        """Answer one request.

        Raises:
            NoWorkerError: a stage has no worker.
            EPDError: why the last attempt failed.
            CancelledError: the client left.
        """
        placed = self._place(job, set())
        left_out = set[Worker]()
        number = 1
        with ExitStack() as in_budget:
            while True:
                rid = attempt_id(record.request_id, number)
                failure = await self._attempt(rid, record, job, placed, sink, left_out)
                if failure is None:
                    return
                is_over = sink.has_started or self._is_late(record)
                if is_over or number == self._max_attempts:
                    raise failure.error
                placed = self._place_again(job, left_out, failure)
                in_budget.close()
                if not failure.is_of_the_dead:
                    if not self._budget.has_room:
                        raise failure.error
                    in_budget.enter_context(self._budget.running())
                number += 1
                self._note_retry(record, failure.error)

    async def _attempt(
        self,
        rid: RequestId,
        record: RequestRecord,
        job: Job,
        placed: PlacedPair,
        sink: Sink,
        left_out: set[Worker],
    ) -> _Failure | None:
        """One attempt; returns why it failed, or None."""
        pair = placed.pair
        record.placements += placed.placements
        self._pairs.remember(pair.prefill, job.blocks)
        with ExitStack() as held:
            held.enter_context(pair.decode.carrying(placed.kv_tokens))
            # What weighs on the prefill worker until decode has the KV.
            prefill_load = held.enter_context(ExitStack())
            prefill_load.enter_context(pair.prefill.carrying(placed.prefill_tokens))
            dispatch = Dispatch(
                self._client,
                self._clock,
                self._limits,
                record,
                pair,
                is_stream=job.is_stream,
                is_encoding=lambda: self._gateway.is_encoding(rid),
                has_others=lambda worker: self._has_others(worker, left_out),
                on_hand_over=prefill_load.close,
                hang_s=self._hang_s,
            )
            body = job.body.of_attempt(rid, self._mint_room(), pair.prefill.report)
            record.enter(RequestState.DISPATCHED)
            with self._in_room(rid, record, pair, job.image_tokens):
                try:
                    await dispatch.run(body, sink)
                except EPDError as error:
                    return self._judge(rid, dispatch, error)
        for worker in (pair.prefill, pair.decode):
            self._registry.succeeded(worker)
        return None

    def _judge(self, rid: RequestId, dispatch: Dispatch, error: EPDError) -> _Failure:
        """Whose fault a failure is; a living worker's own counts against its breaker."""
        pair, told_by = dispatch.pair, dispatch.told_by(error)
        no_image = self._gateway.failure(rid) is not None
        if no_image or told_by is None or not error.retryable or isinstance(error, NoWorkerError):
            return _Failure(error)
        both_or_one = [{pair.prefill, pair.decode}, {pair.decode}, {pair.prefill}]
        dead = {worker for worker in (pair.prefill, pair.decode) if not worker.is_sound}
        if dead:
            return _Failure(error, [dead], is_of_the_dead=True)
        if hung := dispatch.hung:
            for worker in hung:
                self._registry.hung(worker)
            # Of two that wait for one another, one may be well.
            leave_out = both_or_one if len(hung) == 2 else [set(hung)]
            return _Failure(error, leave_out, is_of_the_dead=True)
        if isinstance(error, _OF_A_PEER):
            return _Failure(error, both_or_one)
        if isinstance(error, WorkerError):  # and not busy
            self._registry.failed(told_by)
        return _Failure(error, [{told_by}])

    def _place(self, job: Job, left_out: set[Worker]) -> PlacedPair:
        placed = self._pairs.place(
            job.model_id, job.blocks, job.image_tokens, job.max_new_tokens, left_out
        )
        _check_context(job.num_image_tokens, placed.pair)
        return placed

    def _place_again(self, job: Job, left_out: set[Worker], failure: _Failure) -> PlacedPair:
        """Place the next attempt; adds to `left_out`. Raises the failure if there is none."""
        for workers in failure.leave_out:
            with contextlib.suppress(NoWorkerError):
                placed = self._place(job, left_out | workers)
                left_out |= workers
                return placed
        raise failure.error

    def _has_others(self, worker: Worker, left_out: set[Worker]) -> bool:
        try:
            ready = self._registry.ready(worker.stage, worker.report.model.model_id)
        except NoWorkerError:
            return False
        return not left_out.union([worker]).issuperset(ready)

    def _is_late(self, record: RequestRecord) -> bool:
        return self._clock.monotonic() - record.created_s >= self._limits.first_token_s

    def _note_retry(self, record: RequestRecord, error: EPDError) -> None:
        record.retries.append(error.message)
        self._metrics.retries.labels(error.code).inc()
        logger.warning(
            "tried again on other workers: %s", error, extra={"request_id": record.request_id}
        )

    @contextlib.contextmanager
    def _in_room(
        self, rid: RequestId, record: RequestRecord, pair: Pair, image_tokens: dict[str, int]
    ) -> Generator[None]:
        """Let workers meet over an attempt; afterwards make those drop it that still hold it."""
        self._gateway.open(rid, record, pair.prefill, image_tokens)
        self._metrics.rooms_open.inc()
        try:
            yield
        finally:
            self._metrics.rooms_open.dec()
            holders = self._gateway.close(rid)
            if not record.is_answered:
                holders += [pair.prefill, pair.decode]
            for worker in holders:
                self._in_background(self._client.abort(worker, rid))


def _check_context(num_image_tokens: int, pair: Pair) -> None:
    """Refuse images that no prompt has room for before any of them is encoded."""
    context_tokens = min(w.report.model.context_tokens for w in (pair.prefill, pair.decode))
    if num_image_tokens >= context_tokens:
        raise ContextLengthError(
            f"the images alone take {num_image_tokens} tokens, and the model's context is "
            f"{context_tokens}: send fewer or smaller images",
            param="messages",
        )
