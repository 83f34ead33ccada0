"""How a decode worker takes a request over: asks for its terms, makes room, has the KV sent."""

from __future__ import annotations

from epd.engines.contract.room_calls import RoomCalls
from epd.engines.shell import PeerClient, WorkerMetrics
from epd.engines.torch.kv_lender import KVLender
from epd.errors import TransferError, UnreachableError, WorkerError
from epd.transfer import QUARANTINE_S, TransferEngine
from epd.wire import ChatRequest, KVLayout, RoomDescriptor, RoomSendRequest


class KVIntake:
    """One per decode worker."""

    def __init__(
        self,
        *,
        peers: PeerClient,
        lender: KVLender,
        transfer: TransferEngine,
        layout: KVLayout,
        metrics: WorkerMetrics,
        timeout_s: float,
    ) -> None:
        """Wire the parts together; `timeout_s` bounds each single wait of a request."""
        self._rooms = RoomCalls(peers, timeout_s)
        self._lender = lender
        self._transfer = transfer
        self._layout = layout
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def describe(self, chat: ChatRequest) -> RoomDescriptor:
        """The terms of the request's room, once prefill is done.

        Raises:
            EPDError: prefill failed, with the error that its own client gets.
        """
        descriptor = await self._rooms.describe(chat)
        self._check(descriptor)
        return descriptor

    async def take(
        self, chat: ChatRequest, descriptor: RoomDescriptor, num_tokens: int
    ) -> list[int]:
        """Blocks for `num_tokens` tokens with the room's KV in the first; the caller owns them.

        Raises:
            OverloadedError: no room in the pool in time.
            EPDError: the hand-off failed; the blocks it may still write to are kept from others.
        """
        block_ids = await self._lender.lend(num_tokens, self._timeout_s)
        offered, rest = block_ids[: descriptor.num_blocks], block_ids[descriptor.num_blocks :]
        try:
            answer = await self._rooms.send(
                chat,
                RoomSendRequest(
                    generation=descriptor.generation,
                    session_id=self._transfer.session_id,
                    block_addresses=self._lender.addresses(offered),
                ),
            )
            expected = len(offered) * self._lender.pool.shape.block_bytes
            if answer.nbytes != expected:
                raise TransferError(f"{answer.nbytes} of {expected} KV bytes were written")
        except UnreachableError:
            self._lender.give_back(block_ids)  # nobody was told to write
            raise
        except BaseException:
            self._lender.quarantine(offered, QUARANTINE_S)
            self._lender.give_back(rest)
            raise
        self._metrics.kv_bytes.labels("received").inc(expected)
        return block_ids

    def _check(self, descriptor: RoomDescriptor) -> None:
        """Refuse KV that this worker would read as garbage."""
        theirs, ours = descriptor.layout, self._layout
        if theirs.model_fingerprint != ours.model_fingerprint:
            raise WorkerError("prefill and decode serve different weights: the KV is refused")
        if theirs != ours:
            raise WorkerError(f"prefill's KV layout {theirs} is not this decode worker's {ours}")
        num_blocks = self._lender.pool.shape.num_blocks(descriptor.num_kv_tokens)
        if descriptor.num_blocks != num_blocks:
            raise WorkerError(
                f"prefill offers {descriptor.num_blocks} blocks of KV that has {num_blocks}"
            )
