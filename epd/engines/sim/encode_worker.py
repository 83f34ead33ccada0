"""The simulated encode stage: images are fetched and measured, but nothing looks at them.

/encode                       fetch, wait as long as encoding takes    (SimEncodeWorker.encode)
/scheduler_receive_meta_data  wait for that, then say the sizes        (SimEncodeWorker.metadata)
/send                         wait as long as the bytes take           (SimEncodeWorker.send)

The contract's state, parts and the cache of embeddings, is that of the torch engine.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

import encoders
from epd.engines.shell import Shell
from epd.engines.sim.encode_batches import EncodeBatches
from epd.engines.sim.faults import Faults
from epd.engines.sim.link import Link
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import Profile
from epd.engines.torch.embedding_store import EmbeddingStore, Entry, Stored
from epd.engines.torch.image_source import ImageReference, content_hash_of, fetch_image
from epd.engines.torch.parts import Part, PartTable
from epd.errors import BadRequestError, EPDError, WorkerError
from epd.media import inspect_image
from epd.wire import (
    EncodeRequest,
    EncodeResponse,
    Load,
    MetadataRequest,
    SendRequest,
    SendResponse,
    parse,
    rid_of,
)

_ADDRESS = 2**20
"""Where the memory would be: regions are only counted."""
_MAX_PIXELS = 10**9
"""A backstop: the coordinator's limit is lower, and nothing is decoded here."""


class SimEncodeWorker:
    """See `epd.engines.shell.StageWorker`."""

    def __init__(
        self, shell: Shell, profile: Profile, pace: Pace, faults: Faults, *, timeout_s: float
    ) -> None:
        self._shell = shell
        self._faults = faults
        self._model = profile.model
        self._format = profile.model.embedding_format
        self._timeout_s = timeout_s
        self._batches = EncodeBatches(profile.encode, pace, shell.metrics)
        self._link = Link(profile.transfer, pace)
        nbytes = profile.encode.cache_image_tokens * self._format.token_bytes
        self._store = EmbeddingStore(_ADDRESS, nbytes, shell.clock)
        self._parts = PartTable(self._store, lease_s=timeout_s)
        shell.metrics.gauge(
            "epd_arena_pinned_bytes",
            "Bytes of an arena that a running request needs",
            lambda: self._store.needed_bytes,
            arena="embedding",
        )

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/encode", self.encode),
            web.post("/scheduler_receive_meta_data", self.metadata),
            web.post("/send", self.send),
        ]

    async def encode(self, request: web.Request) -> web.Response:
        """Encode a part and hold it for whoever will send for it."""
        message = parse(EncodeRequest, await request.read())
        if message.modality != "IMAGE":
            raise BadRequestError(f"modality {message.modality} is not served", param="modality")
        images = [ImageReference(item) for item in message.mm_items]
        self._shell.lifecycle.check_accepts_work()
        async with self._shell.requests.scope(rid_of(message.req_id)):
            with self._shell.metrics.outcome():
                part = self._parts.open(message.req_id, images)
                try:
                    response = await self._encode_part(
                        part, message, self._faults.slow_factor(request)
                    )
                except EPDError as error:
                    self._parts.remove(part, error)
                    raise
                except BaseException:
                    self._parts.remove(part, WorkerError("encoding was cancelled"))
                    raise
        return web.json_response(response.model_dump())

    async def metadata(self, request: web.Request) -> web.Response:
        """The part's sizes, once it is encoded."""
        message = parse(MetadataRequest, await request.read())
        async with self._shell.requests.scope(rid_of(message.req_id)):
            response = await self._parts.wait_encoded(message.req_id, self._timeout_s)
        return web.json_response(response.model_dump())

    async def send(self, request: web.Request) -> web.Response:
        """Hand the part over and let go of it."""
        message = parse(SendRequest, await request.read())
        async with self._shell.requests.scope(rid_of(message.req_id)):
            part = self._parts.begin_send(message.req_id)
            try:
                response = await self._send_part(part, message, self._faults.slow_factor(request))
            except BaseException:
                self._parts.send_again(part)
                raise
            self._parts.remove(part)
        return web.json_response(response.model_dump())

    def load(self) -> Load:
        stats = self._store.arena.stats()
        return Load(
            num_running_reqs=self._parts.num_encoding,
            num_waiting_reqs=self._batches.num_waiting,
            num_waiting_tokens=self._batches.num_waiting_tokens,
            num_used_tokens=stats.used_bytes // self._format.token_bytes,
            max_total_num_tokens=stats.capacity_bytes // self._format.token_bytes,
            num_completed_reqs=self._shell.requests.num_completed,
        )

    def abort(self, rid: str) -> None:
        self._parts.remove_request(rid)

    async def wait_idle(self) -> None:
        await self._store.wait_idle()

    def describe(self) -> dict[str, Any]:
        return {
            "model_fingerprint": self._format.fingerprint,
            "embedding_bytes": self._store.arena.capacity_bytes,
        }

    async def close(self) -> None:
        self._parts.close()
        await self._store.close()
        await self._batches.close()

    async def _encode_part(
        self, part: Part, message: EncodeRequest, slow_factor: float
    ) -> EncodeResponse:
        began_s = self._shell.clock.monotonic()
        stored = [await self._encode_image(part, image, slow_factor) for image in part.images]
        num_tokens = sum(image.num_tokens for image in stored)
        response = EncodeResponse(
            req_id=message.req_id,
            part_idx=message.part_idx,
            embedding_size=num_tokens * self._format.token_bytes,
            embedding_len=num_tokens,
            embedding_dim=self._format.hidden_size,
            grids=[(image.grid.t, image.grid.h, image.grid.w) for image in stored],
            dtype=self._format.dtype,
            model_fingerprint=self._format.fingerprint,
        )
        self._parts.publish(part, response)
        self._shell.span(rid_of(message.req_id), "encode", began_s, num_tokens=num_tokens)
        return response

    async def _encode_image(self, part: Part, image: ImageReference, slow_factor: float) -> Stored:
        """Have the image encoded, and held for the part."""
        entry, is_hit = await self._pin(image, slow_factor)
        if is_hit:
            self._shell.metrics.cache_hits.inc()
        try:
            stored = await entry.stored()
            self._parts.hold(part, entry.key)
        finally:
            self._store.unpin(entry)
        return stored

    async def _pin(self, image: ImageReference, slow_factor: float) -> tuple[Entry, bool]:
        """The image's entry, pinned, and whether it was there; else it is fetched and encoded."""
        data: bytes | None = None
        if image.content_hash is None:
            data = await fetch_image(self._shell.peers.session, image, self._timeout_s)
            image.content_hash = content_hash_of(data)
        key = image.content_hash
        return self._store.pin(key, lambda: self._produce(key, image, data, slow_factor))

    async def _produce(
        self, key: str, image: ImageReference, data: bytes | None, slow_factor: float
    ) -> Stored:
        if data is None:
            data = await fetch_image(self._shell.peers.session, image, self._timeout_s)
        facts = inspect_image(data, max_pixels=_MAX_PIXELS)
        family, budget = encoders.family_of(self._model.model_type), self._model.image_budget
        grid = family.grid(facts.width, facts.height, budget)
        num_tokens = family.grid_tokens(grid, budget)
        nbytes = num_tokens * self._format.token_bytes
        region = await self._store.reserve(nbytes, key, self._timeout_s)
        try:
            await self._batches.encode(num_tokens, slow_factor)
        except BaseException:
            self._store.arena.release(region)
            raise
        return Stored(region, grid, num_tokens)

    async def _send_part(
        self, part: Part, message: SendRequest, slow_factor: float
    ) -> SendResponse:
        began_s = self._shell.clock.monotonic()
        nbytes = 0
        for image in part.images:
            entry, _ = await self._pin(image, slow_factor)
            try:
                image_bytes = (await entry.stored()).num_tokens * self._format.token_bytes
                await self._link.send(image_bytes, slow_factor)
            finally:
                self._store.unpin(entry)
            nbytes += image_bytes
        self._shell.metrics.embedding_bytes.labels("sent").inc(nbytes)
        self._shell.span(rid_of(message.req_id), "embedding_handoff", began_s, nbytes=nbytes)
        return SendResponse(nbytes=nbytes, duration_s=self._shell.clock.monotonic() - began_s)
