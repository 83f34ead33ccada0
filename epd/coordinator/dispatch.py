"""Prefill and decode of one request: both are asked at once, decode's answer is relayed.

The answer may be the rest of one whose beginning the client has from another pair.

The pair lives and dies together until decode has the KV; from then on prefill no longer matters,
nor decode once its whole answer is here. Whatever ends it first wins and the rest is cancelled: an
error of either worker, a worker whose lease lapses or that hangs, a deadline, or the client
leaving. Before a byte has reached the client an error is raised and becomes an HTTP status;
afterwards it becomes an SSE error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from epd.clock import Clock
from epd.config import RequestConfig
from epd.coordinator.client import WorkerClient
from epd.coordinator.lifecycle import RequestRecord, RequestState
from epd.coordinator.transcript import Transcript
from epd.errors import (
    AbortedError,
    BadRequestError,
    DeadlineError,
    EPDError,
    WorkerError,
    from_dict,
    leaves,
)
from epd.pools.registry import Worker
from epd.types import Stage

logger = logging.getLogger(__name__)

_PATH = "/v1/chat/completions"
_PREFILL_GRACE_S = 1.0
_PIECE_BYTES = 2**16
_EVENT_END = b"\n\n"
# Neither can be part of a token's text: inside JSON a quote and a line end are escaped.
_ERROR_EVENT = b'data: {"error"'
_DONE_EVENT = b"data: [DONE]\n\n"
_CLIENT_IS_SLOW = "the client did not read"


class Sink(Protocol):
    """Where the answer goes: the client's connection, or a test's list.

    Each method raises AbortedError if the client is no longer there.
    """

    @property
    def has_started(self) -> bool:
        """Whether a status line has been sent; from then on no other status is possible."""
        ...

    async def start(self, content_type: str) -> None:
        """Send status 200 and headers."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; waits while the client reads slowly."""
        ...

    async def finish(self) -> None:
        """Tell the client that it has the whole body."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers chosen for one request."""

    prefill: Worker
    decode: Worker


class Dispatch:
    """One attempt at one request on one pair."""

    def __init__(
        self,
        client: WorkerClient,
        clock: Clock,
        limits: RequestConfig,
        record: RequestRecord,
        pair: Pair,
        transcript: Transcript | None,
        *,
        is_stream: bool,
        is_encoding: Callable[[], bool],
        has_others: Callable[[Worker], bool],
        on_hand_over: Callable[[], None],
        hang_s: float,
    ) -> None:
        """Prepare the attempt.

        Args:
            client: reaches the workers.
            clock: measures deadlines.
            limits: the deadlines, unless the record has those of its class.
            record: the request's.
            pair: who does the work.
            transcript: notes what the client gets, if others could go on with the stream.
            is_stream: whether the client wants server-sent events.
            is_encoding: whether an image of the request is with an encode worker, so that the pair
                may well wait.
            has_others: whether another worker could do what one of the pair does; if not, there is
                nothing better than to wait for it.
            on_hand_over: called once decode has the KV, and prefill is free of the request.
            hang_s: without progress before that for so long, a worker of the pair counts as hung.
        """
        self._client = client
        self._clock = clock
        self._limits = record.limits or limits
        self._record = record
        self.pair = pair
        self._transcript = transcript
        self._is_stream = is_stream
        self._is_encoding = is_encoding
        self._has_others = has_others
        self._on_hand_over = on_hand_over
        self._hang_s = hang_s
        self.hung: frozenset[Worker] = frozenset()
        """The workers that ended the attempt by standing still."""
        self._told_by: dict[EPDError, Worker] = {}
        self._handed_over = asyncio.Event()  # decode has the KV: prefill is no longer needed
        self._is_received = False  # the answer is all here: decode is no longer needed
        self._deadline_moved = asyncio.Event()  # nearer: progress only puts it off
        self._progress_s = clock.monotonic()
        self._is_streaming = False
        is_begun = record.first_token_s is not None
        self._awaited = f"the {'next' if is_begun else 'first'} token did not come"

    async def run(self, body: bytes, sink: Sink) -> None:
        """Carry the request out and relay decode's answer to `sink`.

        Raises:
            EPDError: the first failure of either worker, a deadline, or AbortedError.
            CancelledError: the client left.
        """
        try:
            async with asyncio.TaskGroup() as group:
                prefill = group.create_task(self._prefill(body))
                guards = [
                    group.create_task(self._watch_clock()),
                    group.create_task(
                        self._watch(self.pair.prefill, lambda: not self._handed_over.is_set())
                    ),
                    group.create_task(self._watch(self.pair.decode, lambda: not self._is_received)),
                ]
                await self._relay(body, sink)
                # Prefill answers once decode has its KV, so it is done or about to be.
                await asyncio.wait([prefill], timeout=_PREFILL_GRACE_S)
                for task in (prefill, *guards):
                    task.cancel()
        except* EPDError as failures:
            if not self._record.is_answered:
                raise _most_telling(failures) from None

    def told_by(self, error: EPDError) -> Worker | None:
        """The worker whose answer, or whose end, `error` is; None for a deadline and the client."""
        return self._told_by.get(error)

    @contextlib.contextmanager
    def _told_by_worker(self, worker: Worker) -> Generator[None]:
        try:
            yield
        except EPDError as error:
            if not isinstance(error, AbortedError):
                self._told_by[error] = worker
            raise

    async def _prefill(self, body: bytes) -> None:
        worker = self.pair.prefill
        try:
            with self._told_by_worker(worker):
                async with await self._client.open(worker, _PATH, body) as response:
                    answer = await self._client.read(worker, response)
                    if self._transcript is not None:
                        self._transcript.prefill_answer = answer
                    worker.progress_s = self._clock.monotonic()
        except EPDError as error:
            if not self._handed_over.is_set():
                raise
            logger.warning(
                "prefill failed after its hand-off, decode goes on: %s",
                error,
                extra={"request_id": self._record.request_id, "worker_id": worker.worker_id},
            )
        else:
            self._hand_over()

    async def _relay(self, body: bytes, sink: Sink) -> None:
        worker = self.pair.decode
        with self._told_by_worker(worker):
            response = await self._client.open(worker, _PATH, body)
            try:
                if response.content_type == "text/event-stream":
                    await self._relay_events(response, sink)
                else:
                    answer = await self._client.read(worker, response)
                    worker.progress_s = self._clock.monotonic()
                    self._is_received = True
                    self._hand_over()
                    await self._relay_answer(answer, response.content_type, sink)
            finally:
                response.release()

    async def _relay_answer(self, answer: bytes, content_type: str, sink: Sink) -> None:
        """Relay a whole answer in pieces, so that a client that reads slowly is seen to read."""
        self._progress_s = self._clock.monotonic()
        self._awaited = _CLIENT_IS_SLOW
        self._deadline_moved.set()
        await sink.start(content_type)
        for start in range(0, len(answer), _PIECE_BYTES):
            await sink.write(answer[start : start + _PIECE_BYTES])
            self._progress_s = self._clock.monotonic()
        self._record.is_answered = True
        await sink.finish()

    async def _relay_events(self, response: aiohttp.ClientResponse, sink: Sink) -> None:
        """Relay whole events, so that an error event never lands in the middle of another."""
        pending = b""
        while chunk := await self._client.read_some(self.pair.decode, response):
            pending = pending + chunk if pending else chunk
            end = pending.rfind(_EVENT_END) + len(_EVENT_END)
            if end < len(_EVENT_END):
                continue
            events, pending = pending[:end], pending[end:]
            await self._relay_whole(events, sink)
        if not self._record.is_answered:
            raise WorkerError(f"{self.pair.decode} cut the stream short")

    async def _relay_whole(self, events: bytes, sink: Sink) -> None:
        # Bytes are relayed as they come: parsing each event would cost more than sending it.
        error_at = events.find(_ERROR_EVENT)
        tokens = events if error_at < 0 else events[:error_at]
        self._progress_s = self.pair.decode.progress_s = self._clock.monotonic()
        self._is_received = error_at < 0 and events.endswith(_DONE_EVENT)
        if tokens:
            if not self._is_streaming:
                await self._begin_stream(sink)
            self._awaited = _CLIENT_IS_SLOW
            await sink.write(self._transcript.note(tokens) if self._transcript else tokens)
            self._progress_s = self._clock.monotonic()
            self._awaited = "the next token did not come"
        if error_at >= 0:
            raise _event_error(events[error_at:])
        if self._is_received:
            self._record.is_answered = True
            await sink.finish()

    async def _begin_stream(self, sink: Sink) -> None:
        self._is_streaming = True
        self._hand_over()
        if not sink.has_started:
            self._record.first_token_s = self._progress_s
            self._record.enter(RequestState.STREAMING)
            await sink.start("text/event-stream")

    def _hand_over(self) -> None:
        if not self._handed_over.is_set():
            self._handed_over.set()
            self._on_hand_over()
            self._record.on_stage_done(Stage.PREFILL, 0)
            self._progress_s = self._clock.monotonic()
            self._awaited = "the next token did not come"
            self._deadline_moved.set()

    async def _watch(self, worker: Worker, is_needed: Callable[[], bool]) -> None:
        await worker.lost.wait()
        if is_needed():
            with self._told_by_worker(worker):
                raise worker.loss

    async def _watch_clock(self) -> None:
        """The one timer of this request: its deadlines, and workers that hang."""
        while True:
            remaining_s = min(self._until_hang_s(), self._until_deadline_s())
            # Not wait_for: Python 3.11's loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._deadline_moved.wait()
            self._deadline_moved.clear()

    def _until_deadline_s(self) -> float:
        """Seconds until the next deadline; raises DeadlineError if one has passed."""
        limits, record = self._limits, self._record
        deadlines = [(record.created_s + limits.total_s, "it was not done", limits.total_s)]
        if not self._handed_over.is_set() and record.first_token_s is None:
            first_token_s = limits.first_token_s
            deadlines.append((record.created_s + first_token_s, self._awaited, first_token_s))
        elif self._is_stream or self._is_received:
            # A whole answer shows no progress until it is there.
            deadlines.append((self._progress_s + limits.stall_s, self._awaited, limits.stall_s))
        deadline_s, what, limit_s = min(deadlines)
        remaining_s = deadline_s - self._clock.monotonic()
        if remaining_s <= 0:
            raise DeadlineError(f"the request was ended: {what} within {limit_s:g} s")
        return remaining_s

    def _awaited_workers(self) -> list[Worker]:
        """Of whom a sign of life is due, lest the request goes to others, if it can."""
        if not self._handed_over.is_set():
            return [self.pair.prefill, self.pair.decode]
        can_go_on = self._transcript is not None and self._awaited != _CLIENT_IS_SLOW
        # A whole answer may take its time; its tokens are not seen.
        is_due = self._is_stream and (not self._is_streaming or can_go_on)
        return [self.pair.decode] if is_due else []

    def _until_hang_s(self) -> float:
        """Seconds until a worker of the pair may count as hung; raises WorkerError if one does.

        A worker that answers others is busy, and one whose images are being encoded waits.
        """
        awaited = self._awaited_workers()
        if not awaited:
            return math.inf
        if self._is_encoding():
            return self._hang_s
        now_s = self._clock.monotonic()
        since_s = max(self._progress_s, self._record.encoded_s)
        until_s = {
            worker: max(since_s, worker.progress_s) + self._hang_s - now_s for worker in awaited
        }
        self.hung = frozenset(w for w in until_s if until_s[w] <= 0 and self._has_others(w))
        for worker in self.hung:
            with self._told_by_worker(worker):
                raise WorkerError(f"{worker} has answered nobody for {self._hang_s:g} s")
        return min(left_s if left_s > 0 else self._hang_s for left_s in until_s.values())


def _most_telling(failures: BaseExceptionGroup[EPDError]) -> EPDError:
    """The failure to report of those that came at once.

    A client's mistake says more than a peer's complaint about it, and an abort only follows from
    something else; otherwise the first.
    """

    def rank(error: EPDError) -> int:
        if isinstance(error, AbortedError):
            return 2
        return 0 if isinstance(error, BadRequestError) else 1

    return min(leaves(failures), key=rank)


def _event_error(event: bytes) -> EPDError:
    """The error that an SSE error event tells; SGLang gives the HTTP status as its code."""
    payload = event.split(_EVENT_END, 1)[0].removeprefix(b"data:")
    try:
        body = json.loads(payload)
    except ValueError:
        return WorkerError("the decode worker failed")
    code = body["error"].get("code") if isinstance(body["error"], dict) else None
    return from_dict(body, code if isinstance(code, int) else 502)
