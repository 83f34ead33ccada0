"""The encode gateway: prefill workers send images to slots of the coordinator, which places them.

A prefill server is started with encoder URLs that are slots here, so SGLang's own shuffle of images
over encoders decides nothing: each part is placed by our policy on a live encode worker, and calls
about that part follow it there. Only small JSON passes; embeddings go worker to worker.

The gateway knows only parts of requests that are in flight. Calls about a part may arrive in any
order; one that comes before the part's `/encode` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from epd.coordinator.client import WorkerClient
from epd.errors import BadRequestError, DeadlineError, NoWorkerError, WorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.routing import Policy
from epd.types import RequestId, Stage
from epd.wire import EncodeRequest, MetadataRequest, SendRequest, parse

logger = logging.getLogger(__name__)

_PART_MARK = "_local_part_"


@dataclass(slots=True)
class _Part:
    """One image part: where it was placed, and the load it is there until it has been sent."""

    placement: asyncio.Future[Worker]
    load: ExitStack = field(default_factory=ExitStack)
    is_sent: bool = False

    @property
    def holder(self) -> Worker | None:
        """The worker that may hold the part's embeddings."""
        placement = self.placement
        if self.is_sent or not placement.done() or placement.cancelled() or placement.exception():
            return None
        return placement.result()


@dataclass(slots=True)
class _Flight:
    """The parts of one request in flight."""

    model_id: str
    image_tokens: dict[str, int]
    """By content hash; the cost the policy weighs."""
    parts: dict[str, _Part] = field(default_factory=dict[str, _Part])


class EncodeGateway:
    """Places image parts on encode workers and routes the calls about them."""

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        policy: Policy,
        *,
        timeout_s: float,
    ) -> None:
        self._registry = registry
        self._client = client
        self._policy = policy
        self._timeout_s = timeout_s
        self._flights: dict[RequestId, _Flight] = {}

    @property
    def num_parts(self) -> int:
        """Parts placed and not yet closed."""
        return sum(len(flight.parts) for flight in self._flights.values())

    def open(self, request_id: RequestId, model_id: str, image_tokens: dict[str, int]) -> None:
        """Expect parts of this request; `image_tokens` is by content hash."""
        self._flights[request_id] = _Flight(model_id, image_tokens)

    def close(self, request_id: RequestId) -> list[Worker]:
        """Forget the request. Returns the workers that may still hold parts nobody will take."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return []
        holders: dict[str, Worker] = {}
        for part in flight.parts.values():
            part.load.close()
            part.placement.cancel()  # nobody waits any more; no effect on a placed part
            if (worker := part.holder) is not None:
                holders[worker.worker_id] = worker
        return list(holders.values())

    async def encode(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/encode`: choose an encode worker for the part and have it encode.

        Raises:
            BadRequestError: the part is of no request in flight, or was already placed.
            NoWorkerError: no encode worker is ready.
            WorkerError: the chosen worker failed.
        """
        request = parse(EncodeRequest, body)
        flight, part = self._part(request.req_id)
        if part.placement.done():
            raise BadRequestError(f"part {request.req_id} was already placed", param="req_id")
        try:
            worker = self._registry.choose(Stage.ENCODE, flight.model_id, self._policy)
        except NoWorkerError as error:
            part.placement.set_exception(error)
            part.placement.exception()  # seen, even if nobody waits for the placement
            raise
        part.placement.set_result(worker)
        part.load.enter_context(worker.carrying(_cost(request, flight.image_tokens)))
        return await self._client.post(worker, "/encode", body, timeout_s=self._timeout_s)

    async def metadata(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/scheduler_receive_meta_data`: sizes, once the part is encoded."""
        request = parse(MetadataRequest, body)
        _, part = self._part(request.req_id)
        return await self._follow(part, "/scheduler_receive_meta_data", body)

    async def send(self, body: bytes) -> dict[str, Any]:
        """`POST {slot}/send`: have the part's holder write it to the receiver."""
        request = parse(SendRequest, body)
        _, part = self._part(request.req_id)
        answer = await self._follow(part, "/send", body)
        part.is_sent = True
        part.load.close()
        return answer

    async def _follow(self, part: _Part, path: str, body: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                # Shielded: a caller that gives up must not cancel the placement for the others.
                worker = await asyncio.shield(part.placement)
        except TimeoutError:
            raise DeadlineError(f"the part was not placed within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            if part.placement.cancelled():
                raise WorkerError("the request ended before the part was placed") from None
            raise
        return await self._client.post(worker, path, body, timeout_s=self._timeout_s)

    def _part(self, req_id: str) -> tuple[_Flight, _Part]:
        request_id = RequestId(req_id.rsplit(_PART_MARK, 1)[0])
        flight = self._flights.get(request_id)
        if flight is None:
            raise BadRequestError(f"part {req_id} is of no request in flight", param="req_id")
        part = flight.parts.get(req_id)
        if part is None:
            part = flight.parts[req_id] = _Part(asyncio.get_running_loop().create_future())
        return flight, part


def _cost(request: EncodeRequest, image_tokens: dict[str, int]) -> int:
    hashes = [item.get("content_hash") for item in request.mm_items if isinstance(item, dict)]
    return sum(image_tokens.get(str(content_hash), 0) for content_hash in hashes)
