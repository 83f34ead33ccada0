"""The encode stage: images in by reference, embeddings out to prefill workers' memory.

/encode                       fetch, encode into the arena, hold       (EncodeWorker.encode)
/scheduler_receive_meta_data  wait for that, then say the sizes        (EncodeWorker.metadata)
/send                         write to the prefill worker, let go      (EncodeWorker.send)
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from encoders import ImageBudget
from epd.engines.shell import ComputeThread, Shell, StageWorker
from epd.engines.torch.embedding_store import EmbeddingStore, Entry, Stored
from epd.engines.torch.encode_batches import EncodeBatches
from epd.engines.torch.image_processor import ImageProcessor, Patches
from epd.engines.torch.image_source import ImageReference, content_hash_of, fetch_image
from epd.engines.torch.memory import rows
from epd.engines.torch.parts import Part, PartTable
from epd.errors import BadRequestError, EPDError, WorkerError
from epd.transfer import Block, TransferEngine
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


class EncodeWorker(StageWorker):
    """See `epd.engines.shell.StageWorker`."""

    def __init__(
        self,
        shell: Shell,
        *,
        processor: ImageProcessor,
        batches: EncodeBatches,
        store: EmbeddingStore,
        buffer: Tensor,
        transfer: TransferEngine,
        budget: ImageBudget,
        hidden_size: int,
        dtype: torch.dtype,
        fingerprint: str,
        num_parameters: int,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `buffer` is the arena's memory, `timeout_s` bounds each wait."""
        self._shell = shell
        self._processor = processor
        self._batches = batches
        self._store = store
        self._buffer = buffer
        self._transfer = transfer
        self._budget = budget
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._fingerprint = fingerprint
        self._num_parameters = num_parameters
        self._timeout_s = timeout_s
        # Decoding and cutting images is CPU work beside the vision tower's; one at a time, since
        # a large image takes a large part of the memory there is.
        self._pixels = ComputeThread(shell.clock, "pixels")
        self._parts = PartTable(store, lease_s=timeout_s)
        shell.metrics.arena_gauges(
            "embedding",
            used_bytes=lambda: store.arena.stats().used_bytes,
            pinned_bytes=lambda: store.needed_bytes,
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
        rid = rid_of(message.req_id)
        self._shell.lifecycle.check_accepts_work()
        async with self._shell.requests.scope(rid):
            with self._shell.metrics.outcome():
                part = self._parts.open(message.req_id, images)
                try:
                    response = await self._encode_part(part, message)
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
        """Write the part to the receiver's memory and let go of it."""
        message = parse(SendRequest, await request.read())
        async with self._shell.requests.scope(rid_of(message.req_id)):
            part = self._parts.begin_send(message.req_id)
            try:
                response = await self._write(part, message)
            except BaseException:
                self._parts.send_again(part)
                raise
            self._parts.remove(part)
        return web.json_response(response.model_dump())

    def load(self) -> Load:
        stats = self._store.arena.stats()
        row_bytes = self._hidden_size * self._dtype.itemsize
        return Load(
            num_running_reqs=self._parts.num_encoding,
            num_waiting_reqs=self._batches.num_waiting,
            num_waiting_tokens=self._batches.num_waiting_patches // self._budget.merge_size**2,
            num_used_tokens=stats.used_bytes // row_bytes,
            max_total_num_tokens=stats.capacity_bytes // row_bytes,
            num_completed_reqs=self._shell.requests.num_completed,
        )

    def abort(self, rid: str) -> None:
        self._parts.remove_request(rid)

    async def wait_idle(self) -> None:
        await self._store.wait_idle()

    def describe(self) -> dict[str, Any]:
        return {
            "session_id": self._transfer.session_id,
            "num_parameters": self._num_parameters,
            "model_fingerprint": self._fingerprint,
            "embedding_bytes": self._store.arena.capacity_bytes,
        }

    async def close(self) -> None:
        self._parts.close()
        await self._store.close()
        self._pixels.close()

    async def _encode_part(self, part: Part, message: EncodeRequest) -> EncodeResponse:
        began_s = self._shell.clock.monotonic()
        stored = [await self._encode_image(part, image) for image in part.images]
        num_tokens = sum(image.num_tokens for image in stored)
        response = EncodeResponse(
            req_id=message.req_id,
            part_idx=message.part_idx,
            embedding_size=sum(image.region.nbytes for image in stored),
            embedding_len=num_tokens,
            embedding_dim=self._hidden_size,
            grids=[(image.grid.t, image.grid.h, image.grid.w) for image in stored],
            dtype=str(self._dtype).removeprefix("torch."),
            model_fingerprint=self._fingerprint,
        )
        self._parts.publish(part, response)
        self._shell.span(rid_of(message.req_id), "encode", began_s, num_tokens=num_tokens)
        return response

    async def _encode_image(self, part: Part, image: ImageReference) -> Stored:
        """Have the image encoded, and held for the part."""
        entry, is_hit = await self._pin(image)
        if is_hit:
            self._shell.metrics.cache_hits.inc()
        try:
            stored = await entry.stored()
            self._parts.hold(part, entry.key)
        finally:
            self._store.unpin(entry)
        return stored

    async def _pin(self, reference: ImageReference) -> tuple[Entry, bool]:
        """The image's entry, pinned, and whether it was there; else it is fetched and encoded."""
        data: bytes | None = None
        if reference.content_hash is None:
            data = await fetch_image(self._shell.peers.session, reference, self._timeout_s)
            reference.content_hash = await asyncio.to_thread(content_hash_of, data)
        content_hash = reference.content_hash
        return self._store.pin(content_hash, lambda: self._produce(content_hash, reference, data))

    async def _produce(self, key: str, reference: ImageReference, data: bytes | None) -> Stored:
        """Fetch and encode one image into a region of the arena."""
        if data is None:
            data = await fetch_image(self._shell.peers.session, reference, self._timeout_s)
        patches = await self._pixels.run(self._processor.patches, data)
        return await self._place(key, patches)

    async def _place(self, key: str, patches: Patches) -> Stored:
        num_tokens = patches.grid.num_patches // self._budget.merge_size**2
        nbytes = num_tokens * self._hidden_size * self._dtype.itemsize
        region = await self._store.reserve(nbytes, key, self._timeout_s)
        try:
            offset = self._store.arena.address_of(region) - self._buffer.data_ptr()
            destination = rows(self._buffer, offset, num_tokens, self._hidden_size, self._dtype)
            await self._batches.encode(patches, destination)
        except BaseException:
            self._store.arena.release(region)
            raise
        return Stored(region, patches.grid, num_tokens)

    async def _write(self, part: Part, message: SendRequest) -> SendResponse:
        began_s = self._shell.clock.monotonic()
        nbytes = 0
        # One image after another: none waits for room while another is pinned.
        for image in part.images:
            destination = message.buffer_address + nbytes
            nbytes += await self._write_image(image, message.session_id, destination)
        self._shell.metrics.embedding_bytes.labels("sent").inc(nbytes)
        self._shell.span(rid_of(message.req_id), "embedding_handoff", began_s, nbytes=nbytes)
        return SendResponse(nbytes=nbytes, duration_s=self._shell.clock.monotonic() - began_s)

    async def _write_image(self, image: ImageReference, session_id: str, destination: int) -> int:
        """Write one image's embeddings, encoded again if they had to go; how many bytes."""
        entry, _ = await self._pin(image)
        try:
            region = (await entry.stored()).region
        except BaseException:
            self._store.unpin(entry)
            raise
        block = Block(self._store.arena.address_of(region), destination, region.nbytes)
        # A write that fails may still be reading: the pin lasts until it has settled.
        await self._transfer.write(
            session_id,
            [block],
            timeout_s=self._timeout_s,
            on_settled=partial(self._store.unpin, entry),
        )
        return region.nbytes
