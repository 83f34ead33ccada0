"""The encode gateway: prefill workers send images to slots of the coordinator, which places them.

A prefill server is started with encoder URLs that are slots here, so SGLang's own shuffle of images
over encoders decides nothing: each part is placed by our policy on a live encode worker, and calls
about that part follow it there. Only small JSON passes; embeddings go worker to worker.

Two ways of delivery are served. Where the receiver pulls (Mooncake), `/encode` is followed by calls
for the sizes and to send. Where the encode worker pushes (SGLang's zmq_to_scheduler), each receiver
says by `/scheduler_receive_url` where to, and `/encode` ends when all is sent.

The gateway knows only parts of requests that are in flight. Calls about a part may arrive in any
order; one that comes before the part's `/encode` waits for it. When a worker fails at a part, the
part is encoded by another one, and calls about it go there: SGLang would fail the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epd.clock import Clock
from epd.coordinator.client import WorkerClient
from epd.coordinator.encode_part import Part
from epd.coordinator.encode_placement import EncodePlacement
from epd.coordinator.lifecycle import RequestRecord
from epd.errors import BadRequestError, DeadlineError, EPDError, NoWorkerError, WorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.router import Router
from epd.pools.routing import Place
from epd.types import RequestId, Stage
from epd.waiting import unless
from epd.wire import EncodeRequest, MetadataRequest, ReceiverRequest, SendRequest, parse, rid_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_PLACEMENTS = 3


@dataclass(slots=True)
class _Flight:
    """The parts of one request in flight."""

    record: RequestRecord
    receiver: Place
    """Where the prefill worker is."""
    image_tokens: dict[str, int]
    """By content hash; the cost the policy weighs."""
    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EPDError | None = None
    """Why a part of it cannot be encoded, by any worker."""


class EncodeGateway:
    """Places image parts on encode workers and routes the calls about them."""

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        router: Router,
        *,
        clock: Clock,
        timeout_s: float,
        hang_s: float,
    ) -> None:
        """Start with nothing in flight.

        Args:
            registry: the encode workers.
            client: reaches them.
            router: chooses among them.
            clock: says when a part was done with.
            timeout_s: how long a part may wait for its place, and a call to an encode worker take.
            hang_s: how long encoding may take where other workers could do it.
        """
        self.placement = EncodePlacement(registry, router)
        self._registry = registry
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._hang_s = hang_s
        self._flights: dict[RequestId, _Flight] = {}

    @property
    def num_parts(self) -> int:
        """Parts placed and not yet closed."""
        return sum(len(flight.parts) for flight in self._flights.values())

    def open(
        self,
        rid: RequestId,
        record: RequestRecord,
        prefill: Worker,
        image_tokens: dict[str, int],
    ) -> None:
        """Expect parts of the attempt `rid` at a request from `prefill`.

        `image_tokens` is by content hash.
        """
        self._flights[rid] = _Flight(record, prefill.place, image_tokens)

    def is_encoding(self, rid: RequestId) -> bool:
        """Whether an encode worker, or none yet, has a part of an attempt that is open."""
        parts = self._flights[rid].parts.values()
        return any(part.encoding is not None and not part.encoding.done() for part in parts)

    def failure(self, rid: RequestId) -> EPDError | None:
        """Why a part of an attempt that is open could not be encoded, if so."""
        return self._flights[rid].failure

    def close(self, rid: RequestId) -> list[Worker]:
        """Forget the attempt. Returns the workers to tell that nobody will take its parts."""
        flight = self._flights.pop(rid, None)
        if flight is None:
            return []
        flight.closed.set()
        holders: set[Worker] = set()
        for part in flight.parts.values():
            holders |= part.holders
            part.close()
        # SGLang's encode server has no way to be told: what it holds ends by its own timeout.
        return [worker for worker in holders if worker.report.engine != "sglang"]

    async def encode(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/encode`: choose an encode worker for the part and have it encode.

        Raises:
            BadRequestError: the part is of no request in flight, or was asked for before.
            NoWorkerError: no encode worker is ready.
            WorkerError: every worker that was tried failed.
        """
        request = parse(EncodeRequest, body)
        flight, part = self._part(request.req_id)
        if part.request is not None:
            raise BadRequestError(f"part {request.req_id} was already placed", param="req_id")
        part.request, part.body = request, body
        return await self._encoded(flight, part)

    async def metadata(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/scheduler_receive_meta_data`: sizes, once the part is encoded."""
        request = parse(MetadataRequest, body)
        flight, part = self._part(request.req_id)
        answer, _ = await self._follow(flight, part, "/scheduler_receive_meta_data", body)
        return answer

    async def receiver(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/scheduler_receive_url`: where the part's holder pushes it to."""
        request = parse(ReceiverRequest, body)
        flight, part = self._part(request.req_id)
        part.is_pushed = True
        while True:
            answer, worker = await self._follow(flight, part, "/scheduler_receive_url", body)
            # The part may have moved while its old holder answered: the new one must know too.
            if part.worker is worker or part.is_sent:
                part.receivers.append(body)
                return answer

    async def send(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/send`: have the part's holder write it to the receiver."""
        request = parse(SendRequest, body)
        flight, part = self._part(request.req_id)
        where = await self._within(part.where())
        answer, worker = await self._follow(
            flight, part, "/send", body, may_move=request.accepts_replay
        )
        part.sent()
        return answer if worker is where else {**answer, "is_replayed": True}

    async def _encoded(self, flight: _Flight, part: Part) -> dict[str, Any]:
        """The answer of the worker that encoded the part, which may not be the first asked."""
        part.encoding = asyncio.create_task(self._encode(flight, part))
        try:
            # Shielded: whoever asks may leave; the part ends with its request.
            return await asyncio.shield(part.encoding)
        except asyncio.CancelledError:
            if part.encoding.cancelled():
                raise WorkerError("the request ended before the part was encoded") from None
            raise

    async def _encode(self, flight: _Flight, part: Part) -> dict[str, Any]:
        failure: EPDError | None = None
        try:
            async with self.placement.turn(flight.record.model_id, part):
                while len(part.failed) < _MAX_PLACEMENTS:
                    async with self.placement.at_work(flight.record.model_id, part) as worker:
                        try:
                            answer = await self._encode_at(flight, part, worker)
                        except (WorkerError, DeadlineError) as error:
                            if flight.closed.is_set():
                                raise
                            failure = error
                            part.take_from(worker)
                            self._blame(worker, error)
                            logger.warning("image part is placed again: %s", error)
                            continue
                    self._registry.succeeded(worker)
                    flight.record.encoded_s = self._clock.monotonic()
                    self.placement.remember(flight.record.model_id, part, worker)
                    flight.record.on_stage_done(Stage.ENCODE, part.num_images)
                    return answer
                assert failure is not None, "a part that was tried so often has failed"
                raise failure
        except NoWorkerError as error:
            # The first failure says more than that nobody is left.
            flight.failure = failure or error
            part.give_up(flight.failure)
            raise flight.failure from None
        except EPDError as error:
            flight.failure = error
            part.give_up(error)
            raise
        except Exception as exc:  # the root of a task: whoever waits for the part must hear of it
            logger.exception("an image part could not be placed")
            error = flight.failure = EPDError("internal error: see the coordinator's log")
            part.give_up(error)
            raise error from exc

    def _blame(self, worker: Worker, error: EPDError) -> None:
        if isinstance(error, DeadlineError):
            if self._clock.monotonic() - worker.progress_s >= self._hang_s:
                self._registry.hung(worker)
        elif worker.is_sound:
            self._registry.failed(worker)

    async def _encode_at(self, flight: _Flight, part: Part, worker: Worker) -> dict[str, Any]:
        """One try. A worker that takes a part over is told the receivers that others had taken."""
        receivers = [
            asyncio.create_task(self._post(flight, worker, "/scheduler_receive_url", body))
            for body in part.receivers
        ]
        has_others = self.placement.has_others(flight.record.model_id, part, worker)
        timeout_s = self._hang_s if has_others else self._timeout_s
        try:
            answer = await self._post(flight, worker, "/encode", part.body, timeout_s)
        finally:
            for task in receivers:
                task.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)
        if part.is_pushed:
            part.sent()  # the answer comes when all has been sent
        return answer

    async def _follow(
        self, flight: _Flight, part: Part, path: str, body: bytes, *, may_move: bool = True
    ) -> tuple[dict[str, Any], Worker]:
        """Make a call about a part where the part is; (the answer, who gave it).

        With `may_move` a part whose worker fails at the call is placed again, and the call too.
        """
        while True:
            worker = await self._within(part.where())
            # A part that is placed again is at its worker before it is encoded there.
            if path == "/send" and not await part.settled_at(worker):
                continue
            try:
                answer = await part.unless_taken(worker, self._post(flight, worker, path, body))
                if answer is not None:
                    return answer, worker
                if not may_move:
                    raise WorkerError(f"the image was taken from {worker}")
                continue
            except (WorkerError, DeadlineError):
                if flight.closed.is_set() or part.encoding is None or not may_move:
                    raise
                if await part.settled_at(worker):
                    # It was encoded, and lost with its worker or on the way.
                    part.take_from(worker)
                    if len(part.failed) == _MAX_PLACEMENTS:
                        raise
                    part.encoding = asyncio.create_task(self._encode(flight, part))
                    part.encoding.add_done_callback(_retrieve)

    async def _post(
        self,
        flight: _Flight,
        worker: Worker,
        path: str,
        body: bytes,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """A call that ends with its request at the latest."""
        call = self._client.post(worker, path, body, timeout_s=timeout_s or self._timeout_s)
        answer = await unless(flight.closed.wait(), call)
        if answer is None:
            raise WorkerError("the request ended")
        return answer

    async def _within(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise DeadlineError(f"the part was not placed within {self._timeout_s:g} s") from None

    def _part(self, req_id: str) -> tuple[_Flight, Part]:
        flight = self._flights.get(RequestId(rid_of(req_id)))
        if flight is None:
            raise BadRequestError(f"part {req_id} is of no request in flight", param="req_id")
        part = flight.parts.get(req_id)
        if part is None:
            part = flight.parts[req_id] = Part(
                flight.image_tokens, flight.receiver, flight.record.placements
            )
        return flight, part


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # `give_up` has told those who wait
