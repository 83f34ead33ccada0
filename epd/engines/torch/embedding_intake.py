"""How a prefill worker gets its images' embeddings: encoded by others, written to its memory.

For each image a part is posted to an encoder slot of the coordinator, which chooses the encode
worker; the sizes come back; then one region for all images of the request is taken in the landing
arena, and each holder is asked to write its part there. One region, not one per image: requests
that each held some and waited for more could wait for each other for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from encoders import ImageGrid
from epd.engines.shell import Shell
from epd.engines.torch.memory import rows
from epd.errors import (
    BadRequestError,
    EPDError,
    OverloadedError,
    TransferError,
    WorkerError,
    leaves,
)
from epd.transfer import QUARANTINE_S, Arena, TransferEngine
from epd.wire import (
    ChatRequest,
    EncodeRequest,
    EncodeResponse,
    MetadataRequest,
    MetadataResponse,
    SendRequest,
    SendResponse,
)

T = TypeVar("T")

_GATEWAY = "the coordinator's encode gateway"


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A part that an encode worker holds for us."""

    req_id: str
    part_idx: int
    slot_url: str
    grid: ImageGrid
    num_tokens: int
    nbytes: int


class EmbeddingIntake:
    """One per prefill worker."""

    def __init__(
        self,
        shell: Shell,
        *,
        arena: Arena,
        buffer: Tensor,
        transfer: TransferEngine,
        hidden_size: int,
        dtype: torch.dtype,
        fingerprint: str,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `buffer` is the landing arena's memory."""
        self.arena = arena
        self._shell = shell
        self._buffer = buffer
        self._transfer = transfer
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s

    async def encode(self, rid: str, chat: ChatRequest) -> list[EncodedImage]:
        """Have all images of a request encoded, at once; returns when all are.

        Raises:
            EPDError: the first failure; one about the image names its field in the request.
        """
        slots = self._slots() if chat.images else []
        return await all_of(
            self._encode_one(
                EncodeRequest(
                    req_id=f"{rid}_local_part_{index}",
                    mm_items=[part.image_url.model_dump(exclude_none=True)],
                    num_parts=len(chat.images),
                    part_idx=index,
                ),
                slots[index % len(slots)],
                path,
            )
            for index, (path, part) in enumerate(chat.images)
        )

    @asynccontextmanager
    async def landed(self, rid: str, images: Sequence[EncodedImage]) -> AsyncGenerator[Tensor]:
        """The embeddings of all images in order, `[num_image_tokens, hidden_size]`, while inside.

        Raises:
            OverloadedError: no room in the landing arena in time.
            EPDError: a hand-off failed; where bytes may still land is kept from others.
        """
        nbytes = sum(image.nbytes for image in images)
        if nbytes > self.arena.capacity_bytes:
            raise BadRequestError(
                f"the images' embeddings take {nbytes} bytes, more than this deployment's "
                f"{self.arena.capacity_bytes}: send fewer or smaller images",
                param="messages",
            )
        region = await self.arena.allocate(nbytes, rid, self._timeout_s)
        try:
            address = self.arena.address_of(region)
            starts = accumulate((image.nbytes for image in images), initial=address)
            answers = await all_of(map(self._send_one, images, starts))
        except BaseException:
            self.arena.quarantine(region, QUARANTINE_S)
            raise
        try:
            offset = self.arena.address_of(region) - self._buffer.data_ptr()
            num_rows = sum(image.num_tokens for image in images)
            yield rows(self._buffer, offset, num_rows, self._hidden_size, self._dtype)
        finally:
            if any(answer.is_replayed for answer in answers):
                self.arena.quarantine(region, QUARANTINE_S)
            else:
                self.arena.release(region)

    def _slots(self) -> list[str]:
        grant = self._shell.lease.grant
        if grant is None or not grant.encoder_paths:
            raise OverloadedError("this worker has no lease with the coordinator yet")
        base = self._shell.coordinator.rstrip("/")
        return [base + path for path in grant.encoder_paths]

    async def _encode_one(self, message: EncodeRequest, slot_url: str, path: str) -> EncodedImage:
        peers = self._shell.peers
        question = MetadataRequest(req_id=message.req_id, part_idx=message.part_idx)
        try:
            _, sizes = await all_of(
                [
                    peers.call(
                        "POST",
                        f"{slot_url}/encode",
                        EncodeResponse,
                        peer=_GATEWAY,
                        message=message,
                        timeout_s=self._timeout_s,
                    ),
                    peers.call(
                        "POST",
                        f"{slot_url}/scheduler_receive_meta_data",
                        MetadataResponse,
                        peer=_GATEWAY,
                        message=question,
                        timeout_s=self._timeout_s,
                    ),
                ]
            )
        except BadRequestError as error:
            raise type(error)(error.message, param=path) from error
        self._check(sizes)
        return EncodedImage(
            req_id=message.req_id,
            part_idx=message.part_idx,
            slot_url=slot_url,
            grid=ImageGrid(*sizes.grids[0]),
            num_tokens=sizes.embedding_len,
            nbytes=sizes.embedding_size,
        )

    def _check(self, sizes: EncodeResponse) -> None:
        """Refuse embeddings that this worker's model cannot read."""
        dtype = str(self._dtype).removeprefix("torch.")
        if sizes.model_fingerprint not in ("", self._fingerprint):
            raise WorkerError("the encode worker serves other weights than this prefill worker")
        if (sizes.embedding_dim, sizes.dtype) != (self._hidden_size, dtype):
            raise WorkerError(
                f"the encode worker gives {sizes.embedding_dim} x {sizes.dtype}, this prefill "
                f"worker reads {self._hidden_size} x {dtype}"
            )
        row_bytes = self._hidden_size * self._dtype.itemsize
        if sizes.embedding_size != sizes.embedding_len * row_bytes or len(sizes.grids) != 1:
            raise WorkerError("the encode worker's sizes contradict each other")

    async def _send_one(self, image: EncodedImage, address: int) -> SendResponse:
        answer = await self._shell.peers.call(
            "POST",
            f"{image.slot_url}/send",
            SendResponse,
            peer=_GATEWAY,
            message=SendRequest(
                req_id=image.req_id,
                part_idx=image.part_idx,
                session_id=self._transfer.session_id,
                buffer_address=address,
                accepts_replay=True,
            ),
            timeout_s=self._timeout_s,
        )
        if answer.nbytes != image.nbytes:
            raise TransferError(f"{answer.nbytes} of {image.nbytes} embedding bytes were written")
        self._shell.metrics.embedding_bytes.labels("received").inc(answer.nbytes)
        return answer


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls in order, run together; the first failure cancels the rest.

    Raises:
        EPDError: the first failure, bare rather than in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except* EPDError as failures:
        raise leaves(failures)[0] from None
    return [task.result() for task in tasks]
