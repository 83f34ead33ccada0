"""Prefill and decode of one request: both are asked at once, decode's answer is relayed.

The pair lives and dies together. Whatever ends it first wins and the rest is cancelled: an error of
either worker, a worker whose lease lapses, a deadline, or the client leaving. Before a byte has
reached the client an error is raised and becomes an HTTP status; afterwards it becomes an SSE error
event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from epd.clock import Clock
from epd.config import RequestConfig
from epd.coordinator.client import WorkerClient
from epd.coordinator.lifecycle import RequestRecord, RequestState
from epd.errors import DeadlineError, EPDError, WorkerError, from_dict
from epd.pools.registry import Worker

logger = logging.getLogger(__name__)

_PREFILL_GRACE_S = 5.0
_ERROR_EVENT = b'data: {"error"'


class Sink(Protocol):
    """Where the answer goes: the client's connection, or a test's list."""

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
    ) -> None:
        self._client = client
        self._clock = clock
        self._limits = limits
        self._record = record
        self._pair = pair
        self._progress_s = clock.monotonic()

    async def run(self, body: bytes, sink: Sink) -> None:
        """Carry the request out and relay decode's answer to `sink`.

        Raises:
            EPDError: the first failure of either worker, or a deadline.
            CancelledError: the client left.
        """
        try:
            async with asyncio.TaskGroup() as group:
                prefill = group.create_task(self._prefill(body))
                guards = [
                    group.create_task(self._watch_clock()),
                    *(
                        group.create_task(_watch(w))
                        for w in (self._pair.prefill, self._pair.decode)
                    ),
                ]
                await self._relay(body, sink)
                # Prefill answers once decode has its KV, so it is done or about to be.
                await asyncio.wait([prefill], timeout=_PREFILL_GRACE_S)
                for task in (prefill, *guards):
                    task.cancel()
        except* EPDError as failures:
            raise _first(failures) from None

    async def _prefill(self, body: bytes) -> None:
        try:
            response = await self._client.open(self._pair.prefill, "/v1/chat/completions", body)
            async with response:
                await response.read()
        except (aiohttp.ClientError, OSError) as exc:
            error = self._client.broken(self._pair.prefill, exc)
            if self._record.first_token_s is None:
                raise error from exc
            logger.warning("%s after its hand-off; decode goes on", error)

    async def _relay(self, body: bytes, sink: Sink) -> None:
        response = await self._client.open(self._pair.decode, "/v1/chat/completions", body)
        try:
            if response.content_type == "text/event-stream":
                await self._relay_events(response, sink)
            else:
                body = await response.read()
                await sink.start(response.content_type)
                await sink.write(body)
        except (aiohttp.ClientError, OSError) as exc:
            raise self._client.broken(self._pair.decode, exc) from exc
        finally:
            response.release()

    async def _relay_events(self, response: aiohttp.ClientResponse, sink: Sink) -> None:
        # Bytes are relayed as they come: parsing each event would cost more than sending it.
        tail = b""
        async for chunk in response.content.iter_any():
            self._progress_s = self._clock.monotonic()
            if not sink.has_started:
                if chunk.startswith(_ERROR_EVENT):
                    raise _event_error(chunk)
                self._record.first_token_s = self._progress_s
                self._record.enter(RequestState.STREAMING)
                await sink.start(response.content_type)
            await sink.write(chunk)
            tail = (tail + chunk)[-64:]
        if b"[DONE]" not in tail and b'"error"' not in tail:
            raise WorkerError(f"{self._pair.decode} cut the stream short")

    async def _watch_clock(self) -> None:
        """The one timer of this request: first token, stall and total deadline."""
        ends_s = self._record.created_s + self._limits.total_s
        while True:
            is_streaming = self._record.first_token_s is not None
            limit_s = self._limits.stall_s if is_streaming else self._limits.first_token_s
            remaining_s = min(self._progress_s + limit_s, ends_s) - self._clock.monotonic()
            if remaining_s <= 0:
                what = "the next token" if is_streaming else "the first token"
                raise DeadlineError(f"{what} did not come within the deadline")
            await asyncio.sleep(remaining_s)


async def _watch(worker: Worker) -> None:
    await worker.lost.wait()
    raise WorkerError(f"{worker} vanished")


def _first(failures: BaseExceptionGroup[EPDError]) -> EPDError:
    """The failure to report: a client's mistake says more than a peer's complaint about it."""
    found: list[EPDError] = []

    def collect(group: BaseExceptionGroup[EPDError]) -> None:
        for failure in group.exceptions:
            if isinstance(failure, BaseExceptionGroup):
                collect(failure)
            else:
                found.append(failure)

    collect(failures)
    return min(found, key=lambda error: error.status)


def _event_error(event: bytes) -> EPDError:
    payload = event.split(b"\n", 1)[0].removeprefix(b"data:")
    try:
        body = json.loads(payload)
    except ValueError:
        body = "the decode worker failed"
    code = body.get("error", {}).get("code") if isinstance(body, dict) else None
    return from_dict(body, code if isinstance(code, int) else 502)
