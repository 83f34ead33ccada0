"""What a prefill worker asks of its encoder slots: encode an image, say its size, send it.

Each image is a part of its own, posted to a slot of the coordinator, which chooses the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from encoders import ImageGrid
from epd.engines.shell import Shell
from epd.errors import (
    BadRequestError,
    EPDError,
    OverloadedError,
    TransferError,
    WorkerError,
    leaves,
)
from epd.wire import (
    ChatRequest,
    EncodeRequest,
    EncodeResponse,
    MetadataRequest,
    MetadataResponse,
    SendRequest,
    SendResponse,
    part_id,
)

T = TypeVar("T")

_GATEWAY = "the coordinator's encode gateway"


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """The embeddings that a worker's model reads."""

    hidden_size: int
    dtype: str
    itemsize: int
    """bytes"""
    fingerprint: str

    @property
    def token_bytes(self) -> int:
        return self.hidden_size * self.itemsize

    def check(self, sizes: EncodeResponse) -> None:
        """Raises WorkerError if the encode worker's embeddings are not of this format."""
        if sizes.model_fingerprint not in ("", self.fingerprint):
            raise WorkerError("the encode worker serves other weights than this prefill worker")
        if (sizes.embedding_dim, sizes.dtype) != (self.hidden_size, self.dtype):
            raise WorkerError(
                f"the encode worker gives {sizes.embedding_dim} x {sizes.dtype}, this prefill "
                f"worker reads {self.hidden_size} x {self.dtype}"
            )
        is_sized = sizes.embedding_size == sizes.embedding_len * self.token_bytes
        if not is_sized or len(sizes.grids) != 1:
            raise WorkerError("the encode worker's sizes contradict each other")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A part that an encode worker holds for us."""

    req_id: str
    part_idx: int
    slot_url: str
    grid: ImageGrid
    num_tokens: int
    nbytes: int


class EncodeCalls:
    """The calls about images; `session_id` names this worker's memory to those who send."""

    def __init__(
        self, shell: Shell, format: EmbeddingFormat, *, session_id: str, timeout_s: float
    ) -> None:
        self._shell = shell
        self._format = format
        self._session_id = session_id
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
                    req_id=part_id(rid, index),
                    mm_items=[part.image_url.model_dump(exclude_none=True)],
                    num_parts=len(chat.images),
                    part_idx=index,
                ),
                slots[index % len(slots)],
                path,
            )
            for index, (path, part) in enumerate(chat.images)
        )

    async def send(self, image: EncodedImage, address: int) -> SendResponse:
        """Have a part written to `address` of this worker's memory.

        Raises:
            TransferError: fewer or more bytes were written than the part has.
            EPDError: the holder's own error, or it did not answer.
        """
        answer = await self._shell.peers.call(
            "POST",
            f"{image.slot_url}/send",
            SendResponse,
            peer=_GATEWAY,
            message=SendRequest(
                req_id=image.req_id,
                part_idx=image.part_idx,
                session_id=self._session_id,
                buffer_address=address,
                accepts_replay=True,
            ),
            timeout_s=self._timeout_s,
        )
        if answer.nbytes != image.nbytes:
            raise TransferError(f"{answer.nbytes} of {image.nbytes} embedding bytes were written")
        self._shell.metrics.embedding_bytes.labels("received").inc(answer.nbytes)
        return answer

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
        self._format.check(sizes)
        return EncodedImage(
            req_id=message.req_id,
            part_idx=message.part_idx,
            slot_url=slot_url,
            grid=ImageGrid(*sizes.grids[0]),
            num_tokens=sizes.embedding_len,
            nbytes=sizes.embedding_size,
        )


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
