"""Lends KV blocks to requests: in order of arrival, with a deadline, and never back too early.

The pool itself gives blocks now or not at all; here it gets a line of those who wait. Used on the
event loop only.
"""

from __future__ import annotations

from epd.clock import Clock
from epd.engines.torch.kv_pool import KVPool
from epd.errors import OverloadedError
from epd.transfer import WaitingLine


class KVLender:
    """The queue in front of a worker's KV pool."""

    def __init__(self, pool: KVPool, clock: Clock) -> None:
        self.pool = pool
        self._line = WaitingLine[int, list[int]](
            take=pool.allocate, put_back=pool.free, clock=clock
        )

    @property
    def num_waiting(self) -> int:
        return len(self._line.wants)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(self._line.wants)

    @property
    def num_lent_blocks(self) -> int:
        """Blocks in requests' hands; those in quarantine are in nobody's."""
        num_quarantined = sum(len(block_ids) for block_ids in self._line.quarantined)
        return self.pool.num_used_blocks - num_quarantined

    def addresses(self, block_ids: list[int]) -> list[int]:
        """Where the blocks are in this process's memory."""
        base = self.pool.buffer.data_ptr()
        return [base + self.pool.block_offset(block_id) for block_id in block_ids]

    async def lend(self, num_tokens: int, timeout_s: float) -> list[int]:
        """Blocks for `num_tokens` tokens, when it is this caller's turn. Safe to cancel.

        Raises:
            OverloadedError: no room within `timeout_s`.
        """
        try:
            return await self._line.take(num_tokens, timeout_s)
        except TimeoutError:
            raise OverloadedError(
                f"no KV cache room for {num_tokens} tokens within {timeout_s:g} s",
                retry_after_s=1.0,
            ) from None

    def give_back(self, block_ids: list[int]) -> None:
        self._line.give_back(block_ids)

    def quarantine(self, block_ids: list[int], for_s: float) -> None:
        """Keep from everybody the blocks that late bytes of a failed hand-off may still hit."""
        self._line.quarantine(block_ids, for_s)
