"""The attempts at one request: each on a pair of workers, until one of them answers.

A request whose worker failed is sent to others, under a new id and in a new room, so that what the
failed attempt left behind cannot meet it. Once a part of the answer has reached the client, only
workers that can continue an answer can take it over. Whose fault a failure is decides who is left
out the next time:

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
from dataclasses import dataclass, field
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
from epd.coordinator.transcript import Transcript
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
    with_usage: bool
    """Whether the client wants token counts at the end of a stream."""
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


@dataclass(slots=True)
class _Course:
    """How far one request has come."""

    record: RequestRecord
    job: Job
    sink: Sink
    placed: PlacedPair
    """Who does the attempt."""
    number: int = 1
    """Of the attempt."""
    left_out: set[Worker] = field(default_factory=set[Worker])
    transcript: Transcript | None = None
    """None if the answer is no stream, or its workers cannot continue one."""

    @property
    def rid(self) -> RequestId:
        return attempt_id(self.record.request_id, self.number)

    @property
    def lacks_only_its_end(self) -> bool:
        """Whether there is nothing left for a worker to do."""
        return self.transcript is not None and self.transcript.is_finished

    def begin_transcript(self) -> None:
        """Nothing has reached the client: whether others could go on depends on this attempt."""
        pair = self.placed.pair
        can_go_on = pair.prefill.report.can_continue and pair.decode.report.can_continue
        is_noted = can_go_on and self.job.is_stream
        self.transcript = Transcript(with_usage=self.job.with_usage) if is_noted else None

    def note_tokens(self) -> None:
        """Of an answer from several workers, none of them reports the tokens of the whole."""
        if self.transcript is not None:
            self.record.num_output_tokens = len(self.transcript.token_ids)


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
        course = _Course(record, job, sink, self._place(job, set()))
        with ExitStack() as in_budget:
            while (failure := await self._attempt(course)) is not None:
                if course.lacks_only_its_end and failure.leave_out:
                    return await _end(course, failure)
                if self._is_over(course):
                    raise failure.error
                self._place_again(course, failure)
                in_budget.close()
                if not failure.is_of_the_dead:
                    if not self._budget.has_room:
                        raise failure.error
                    in_budget.enter_context(self._budget.running())
                self._note_retry(record, failure.error)

    async def _attempt(self, course: _Course) -> _Failure | None:
        """One attempt; returns why it failed, or None."""
        rid, record, job, placed = course.rid, course.record, course.job, course.placed
        pair = placed.pair
        record.placements += placed.placements
        self._pairs.remember(pair.prefill, job.blocks)
        if not course.sink.has_started:
            course.begin_transcript()
            record.enter(RequestState.DISPATCHED)
        with ExitStack() as held:
            held.enter_context(pair.decode.carrying(placed.kv_tokens))
            # What weighs on the prefill worker until decode has the KV.
            prefill_load = held.enter_context(ExitStack())
            prefilling = prefill_load.enter_context(pair.prefill.carrying(placed.prefill_tokens))

            def hand_over() -> None:
                prefilling.is_done = True
                prefill_load.close()

            dispatch = Dispatch(
                self._client,
                self._clock,
                self._limits,
                record,
                pair,
                course.transcript,
                is_stream=job.is_stream,
                is_encoding=lambda: self._gateway.is_encoding(rid),
                has_others=lambda worker: self._has_others(worker, course.left_out),
                on_hand_over=hand_over,
                hang_s=self._hang_s,
            )
            body = job.body.of_attempt(
                rid, self._mint_room(), pair.prefill.report, course.transcript
            )
            with self._in_room(rid, record, pair, job.image_tokens):
                try:
                    await dispatch.run(body, course.sink)
                except EPDError as error:
                    return self._judge(rid, dispatch, error)
        for worker in (pair.prefill, pair.decode):
            self._registry.succeeded(worker)
        course.note_tokens()
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

    def _place_again(self, course: _Course, failure: _Failure) -> None:
        """Place the next attempt, or raise the failure if there is nowhere to."""
        unable = set[Worker]()
        if course.sink.has_started:
            unable = {w for w in self._registry.all() if not w.report.can_continue}
        for workers in failure.leave_out:
            with contextlib.suppress(NoWorkerError):
                course.placed = self._place(course.job, course.left_out | workers | unable)
                course.left_out |= workers
                course.number += 1
                return
        raise failure.error

    def _is_over(self, course: _Course) -> bool:
        """Whether a failure now is the end."""
        if course.number == self._max_attempts:
            return True
        if course.sink.has_started:
            return course.transcript is None
        now_s = self._clock.monotonic()
        return now_s - course.record.created_s >= self._limits.first_token_s

    def _has_others(self, worker: Worker, left_out: set[Worker]) -> bool:
        try:
            ready = self._registry.ready(worker.stage, worker.report.model.model_id)
        except NoWorkerError:
            return False
        return not left_out.union([worker]).issuperset(ready)

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


async def _end(course: _Course, failure: _Failure) -> None:
    """Tell the client what follows the finish reason, which it has."""
    assert course.transcript is not None, "only a noted stream is known to be finished"
    end = course.transcript.end
    if end is None:
        raise failure.error
    await course.sink.write(end)
    course.record.is_answered = True
    course.note_tokens()
    await course.sink.finish()


def _check_context(num_image_tokens: int, pair: Pair) -> None:
    """Refuse images that no prompt has room for before any of them is encoded."""
    context_tokens = min(w.report.model.context_tokens for w in (pair.prefill, pair.decode))
    if num_image_tokens >= context_tokens:
        raise ContextLengthError(
            f"the images alone take {num_image_tokens} tokens, and the model's context is "
            f"{context_tokens}: send fewer or smaller images",
            param="messages",
        )
