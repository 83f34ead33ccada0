"""How a prefill worker gets its images' embeddings: encoded by others, written to its memory.

For each image a part is posted to an encoder slot of the coordinator, which chooses the encode
worker; the sizes come back; then one region for all images of the request is taken in the landing
arena, and each holder is asked to write its part there. One region, not one per image: requests
that each held some and waited for more could wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from epd.engines.contract.encode_calls import EmbeddingFormat, EncodeCalls, EncodedImage, all_of
from epd.engines.shell import Shell
from epd.engines.torch.memory import rows
from epd.errors import BadRequestError, UnreachableError
from epd.transfer import QUARANTINE_S, Arena, Region, TransferEngine
from epd.wire import ChatRequest, SendResponse


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
        self._buffer = buffer
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._calls = EncodeCalls(
            shell,
            EmbeddingFormat(
                hidden_size, str(dtype).removeprefix("torch."), dtype.itemsize, fingerprint
            ),
            session_id=transfer.session_id,
            timeout_s=timeout_s,
        )

    async def encode(self, rid: str, chat: ChatRequest) -> list[EncodedImage]:
        """Have all images of a request encoded: see `EncodeCalls.encode`."""
        return await self._calls.encode(rid, chat)

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
                f"the images' embeddings take {nbytes} bytes, more than the "
                f"{self.arena.capacity_bytes} of a prefill worker (embedding_bytes): send fewer or "
                "smaller images",
                param="messages",
            )
        region = await self.arena.allocate(nbytes, rid, self._timeout_s)
        told = set[int]()
        try:
            address = self.arena.address_of(region)
            starts = accumulate((image.nbytes for image in images), initial=address)
            answers = await all_of(map(partial(self._send, told), images, starts))
        except BaseException:
            self._give_back(region, may_be_written=bool(told))
            raise
        try:
            offset = self.arena.address_of(region) - self._buffer.data_ptr()
            num_rows = sum(image.num_tokens for image in images)
            yield rows(self._buffer, offset, num_rows, self._hidden_size, self._dtype)
        finally:
            was_replayed = any(answer.is_replayed for answer in answers)
            self._give_back(region, may_be_written=was_replayed)

    async def _send(self, told: set[int], image: EncodedImage, address: int) -> SendResponse:
        """Have one image sent; `told` are the parts whose holder may have heard that it is to."""
        told.add(image.part_idx)
        try:
            return await self._calls.send(image, address)
        except UnreachableError:
            told.remove(image.part_idx)
            raise

    def _give_back(self, region: Region, *, may_be_written: bool) -> None:
        if may_be_written:
            self.arena.quarantine(region, QUARANTINE_S)
        else:
            self.arena.release(region)
