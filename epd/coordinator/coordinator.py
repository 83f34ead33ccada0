"""The coordinator: one method carries a chat request from bytes in to bytes out.

    admit → validate → resolve media → plan → wait for its turn → attempts → end

It owns the order of these steps and the release of all they hold; each step's work is elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

from epd.auth import ANONYMOUS, Caller, ClusterToken
from epd.background import log_crash
from epd.clock import Clock
from epd.config import CoordinatorConfig
from epd.coordinator.admission import AdmissionGate, Ticket
from epd.coordinator.attempts import Attempts, Job
from epd.coordinator.body_budget import BodyBudget, BodyShare
from epd.coordinator.client import WorkerClient
from epd.coordinator.dispatch import Sink
from epd.coordinator.encode_gateway import EncodeGateway
from epd.coordinator.lifecycle import RequestLog, RequestRecord, RequestState
from epd.coordinator.media_urls import MediaURLs
from epd.coordinator.pair_placement import PairPlacement
from epd.coordinator.prompt_blocks import prompt_blocks
from epd.coordinator.request_body import RequestBody, count_image_tokens
from epd.errors import AbortedError, EPDError, OverloadedError
from epd.media import MediaCache, MediaEdge, MediaItem
from epd.observability.metrics import CoordinatorMetrics
from epd.pools.registry import Registry
from epd.pools.router import build_router
from epd.types import Room, Stage
from epd.wire import ModelCard, Span, WorkerReport

logger = logging.getLogger(__name__)

_ABORT_GRACE_S = 5.0
_MEDIA_GRACE_S = 60.0

ReadBody = Callable[[BodyShare], Awaitable[bytes | bytearray]]


class Coordinator:
    """Schedules requests over the pools. Lives as long as its process."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Clock,
        registry: Registry,
        client: WorkerClient,
        edge: MediaEdge,
        media_cache: MediaCache,
        token: ClusterToken,
        base_url: str,
        metrics: CoordinatorMetrics,
        random: Random,
        mint_room: Callable[[], Room] = lambda: Room(secrets.randbits(63)),
    ) -> None:
        """Wire the parts together.

        Args:
            base_url: the URL under which workers reach this coordinator.
            random: draws the lots of routing policies that use them.
            mint_room: gives a room no other request has (63 random bits).
        """
        self.base_url = base_url.rstrip("/")
        self.registry = registry
        self.metrics = metrics
        self.log = RequestLog(clock)
        self.admission = AdmissionGate(config, clock=clock, registry=registry, metrics=metrics)
        media_ttl_s = config.requests.total_s + _MEDIA_GRACE_S
        self.media_urls = MediaURLs(base_url, token, clock, ttl_s=media_ttl_s)
        self.gateway = EncodeGateway(
            registry,
            client,
            build_router(Stage.ENCODE, config.routing, random),
            clock=clock,
            timeout_s=config.requests.first_token_s,
            hang_s=config.retry.hang_s,
        )
        self.pairs = PairPlacement(registry, self.gateway.placement, config.routing, random)
        self.media_cache = media_cache
        self._edge = edge
        self._config = config
        self._clock = clock
        self.bodies = BodyBudget(
            max_body_bytes=config.requests.max_body_bytes,
            max_bytes=config.requests.max_in_flight_bytes,
        )
        self.attempts = Attempts(
            config,
            clock=clock,
            registry=registry,
            client=client,
            gateway=self.gateway,
            pairs=self.pairs,
            metrics=metrics,
            num_in_flight=lambda: self.admission.scheduler.num_given,
            mint_room=mint_room,
            in_background=self._in_background,
        )
        self._num_in_flight = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[Any]] = set()

    def take_report(self, report: WorkerReport) -> None:
        """A worker's report: its lease is renewed, its spans are filed.

        Raises:
            BadRequestError: see `Registry.report`.
        """
        self.registry.report(report)
        self.log.add_spans(report.worker_id, report.spans)
        for span in report.spans:
            self.metrics.stage_seconds.labels(span.name).observe(span.duration_s)
            if span.name in ("embedding_handoff", "kv_handoff"):
                self.metrics.handoff_bytes.labels(span.name).inc(span.nbytes)
            if span.name == "decode" and span.num_tokens > 1:
                self.metrics.tpot.observe(span.duration_s / (span.num_tokens - 1))

    @property
    def is_draining(self) -> bool:
        """Whether this process is about to end and takes no new requests."""
        return self._is_draining

    async def chat(
        self,
        record: RequestRecord,
        read_body: ReadBody,
        sink: Sink,
        *,
        caller: Caller = ANONYMOUS,
        wanted_class: str | None = None,
    ) -> None:
        """Answer one chat request; `record` ends finished, failed or aborted.

        Args:
            record: the request's, just opened.
            read_body: gives the request's body, and counts it in the share of the budget that it
                is given; called once the request is admitted, so that requests over the limit cost
                no memory.
            sink: takes the answer.
            caller: who sends the request.
            wanted_class: the class that it asks for, if it does.

        Raises:
            EPDError: why it failed; the caller tells the client.
            CancelledError: the client left.
        """
        try:
            with self._admit(record, caller, wanted_class) as ticket:
                await self._carry_out(record, ticket, read_body, sink)
        except EPDError as exc:
            exc.request_id = record.request_id
            is_aborted = isinstance(exc, AbortedError)
            state = RequestState.ABORTED if is_aborted else RequestState.FAILED
            self._end(record, state, exc.status, exc.code)
            raise
        except asyncio.CancelledError:
            self._end(record, RequestState.ABORTED, AbortedError.status, AbortedError.code)
            raise
        except Exception as exc:
            logger.exception("request failed", extra={"request_id": record.request_id})
            self._end(record, RequestState.FAILED, EPDError.status, EPDError.code)
            raise EPDError(
                "internal error: see the coordinator's log", request_id=record.request_id
            ) from exc
        else:
            self._end(record, RequestState.FINISHED, 200)

    @contextlib.contextmanager
    def _admit(
        self, record: RequestRecord, caller: Caller, wanted_class: str | None
    ) -> Generator[Ticket]:
        if self._is_draining:
            raise OverloadedError("the coordinator is shutting down; retry", retry_after_s=5.0)
        with self.admission.entered(record, caller, wanted_class) as ticket:
            self._num_in_flight += 1
            self._idle.clear()
            self.metrics.in_flight.inc()
            try:
                yield ticket
            finally:
                self._num_in_flight -= 1
                self.metrics.in_flight.dec()
                if not self._num_in_flight:
                    self._idle.set()

    async def _carry_out(
        self, record: RequestRecord, ticket: Ticket, read_body: ReadBody, sink: Sink
    ) -> None:
        with ExitStack() as held:
            share = held.enter_context(self.bodies.share())
            # What was read, perhaps megabytes of base64, is dropped after this line.
            job = await self._plan(record, await RequestBody.read(await read_body(share)), held)
            share.keep(len(job.body.document))
            work = self.pairs.work(job.model_id, job.blocks, job.image_tokens, job.max_new_tokens)
            await self.admission.turn(ticket, record, work, record.num_images)
            await self.attempts.run(record, job, sink)

    async def _plan(self, record: RequestRecord, body: RequestBody, held: ExitStack) -> Job:
        """Resolve the request's media and say what is to be done; `held` gets what it now holds."""
        card = self.registry.model(body.request.model)
        record.model_id = card.model_id
        self._require_stages(body, card)
        record.enter(RequestState.RESOLVING)
        items = await self._resolve(record, body, held)
        tokens = {item.content_hash: count_image_tokens(card, item) for item in items}
        record.num_images = len(items)
        record.num_image_tokens = sum(tokens[item.content_hash] for item in items)
        self.metrics.image_tokens.inc(record.num_image_tokens)
        hashes = [item.content_hash for item in items]
        media_ttl_s = (record.limits or self._config.requests).total_s + _MEDIA_GRACE_S
        return Job(
            card.model_id,
            await body.for_workers(items, partial(self.media_urls.sign, ttl_s=media_ttl_s)),
            is_stream=body.request.stream,
            with_usage=body.request.with_usage,
            max_new_tokens=body.request.max_new_tokens,
            blocks=prompt_blocks(body.request, hashes, tokens),
            image_tokens=tokens,
            num_image_tokens=record.num_image_tokens,
        )

    def _require_stages(self, body: RequestBody, card: ModelCard) -> None:
        """Fail at once, before any fetch, when a stage has no worker."""
        for stage in Stage:
            if stage is not Stage.ENCODE or body.image_urls:
                self.registry.ready(stage, card.model_id)

    async def _resolve(
        self, record: RequestRecord, body: RequestBody, held: ExitStack
    ) -> list[MediaItem]:
        if not body.image_urls:
            return []
        start_unix_s, start_s = self._clock.time(), self._clock.monotonic()
        lease = await self._edge.resolve_all(body.image_urls)
        items = list(held.enter_context(lease).items)
        span = Span(
            request_id=record.request_id,
            name="fetch",
            start_unix_s=start_unix_s,
            duration_s=self._clock.monotonic() - start_s,
            nbytes=sum(item.num_bytes for item in items),
        )
        record.spans.append(("coordinator", span))
        self.metrics.stage_seconds.labels("fetch").observe(span.duration_s)
        return items

    def _end(
        self, record: RequestRecord, state: RequestState, status: int, code: str | None = None
    ) -> None:
        """Close the record and count it."""
        if record.is_answered:  # a client may hang up as soon as it has its answer
            state, status, code = RequestState.FINISHED, 200, None
        record.enter(state)
        record.ended_s = self._clock.monotonic()
        record.status = status
        record.error_code = code
        self.log.close(record)
        e2e_s = record.ended_s - record.created_s
        self.metrics.requests.labels(state.value, str(status)).inc()
        self.metrics.e2e.observe(e2e_s)
        if record.first_token_s is not None:
            self.metrics.ttft.observe(record.first_token_s - record.created_s)
        logger.info(
            "request %s (%s) in %.3f s",
            state,
            code or status,
            e2e_s,
            extra={"request_id": record.request_id},
        )

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(log_crash)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; give those in flight `timeout_s`, then fail them."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("shutting down with %d requests in flight", self._num_in_flight)
        # Whoever still waits on a worker now gets an error, and its client is told.
        self.registry.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_GRACE_S):
                await self._idle.wait()
                await asyncio.gather(*self._background, return_exceptions=True)
