"""Lends KV blocks to requests: in order of arrival, with a deadline, and never back too early.

The pool itself gives blocks now or not at all; waiting, fairness and quarantine are here. Used on
the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from epd.clock import Clock
from epd.engines.torch.kv_pool import KVPool
from epd.errors import OverloadedError


@dataclass(slots=True, eq=False)
class _Waiter:
    num_tokens: int
    granted: asyncio.Future[list[int]] = field(repr=False)


class KVLender:
    """The queue in front of a worker's KV pool."""

    def __init__(self, pool: KVPool, clock: Clock) -> None:
        self.pool = pool
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._quarantined: list[tuple[float, list[int]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(waiter.num_tokens for waiter in self._waiters)

    @property
    def num_quarantined_blocks(self) -> int:
        self._reap()
        return sum(len(block_ids) for _, block_ids in self._quarantined)

    @property
    def num_lent_blocks(self) -> int:
        """Blocks in requests' hands; those in quarantine are in nobody's."""
        return self.pool.num_used_blocks - self.num_quarantined_blocks

    def addresses(self, block_ids: list[int]) -> list[int]:
        """Where the blocks are in this process's memory."""
        base = self.pool.buffer.data_ptr()
        return [base + self.pool.block_offset(block_id) for block_id in block_ids]

    async def lend(self, num_tokens: int, timeout_s: float) -> list[int]:
        """Blocks for `num_tokens` tokens, when it is this caller's turn. Safe to cancel.

        Raises:
            OverloadedError: no room within `timeout_s`.
        """
        self._reap()
        if not self._waiters:
            block_ids = self.pool.allocate(num_tokens)
            if block_ids is not None:
                return block_ids
        waiter = _Waiter(num_tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.granted
        except (TimeoutError, asyncio.CancelledError) as exc:
            self._withdraw(waiter)
            if isinstance(exc, TimeoutError):
                raise OverloadedError(
                    f"no KV cache room for {num_tokens} tokens within {timeout_s:g} s",
                    retry_after_s=1.0,
                ) from None
            raise

    def give_back(self, block_ids: list[int]) -> None:
        self.pool.free(block_ids)
        self._serve()

    def quarantine(self, block_ids: list[int], for_s: float) -> None:
        """Keep from everybody the blocks that late bytes of a failed hand-off may still hit."""
        self._quarantined.append((self._clock.monotonic() + for_s, block_ids))
        self._serve()

    def _serve(self) -> None:
        self._reap()
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.granted.done():  # a cancelled waiter may not have run yet
                block_ids = self.pool.allocate(waiter.num_tokens)
                if block_ids is None:
                    break
                waiter.granted.set_result(block_ids)
            self._waiters.popleft()
        self._arm_timer()

    def _reap(self) -> None:
        now = self._clock.monotonic()
        for until, block_ids in self._quarantined:
            if until <= now:
                self.pool.free(block_ids)
        self._quarantined = [entry for entry in self._quarantined if entry[0] > now]

    def _arm_timer(self) -> None:
        """Wake up at the next end of a quarantine, if someone waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters and self._quarantined:
            remaining_s = min(until for until, _ in self._quarantined) - self._clock.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(remaining_s, 0.001), self._serve)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave the queue; blocks granted in the same moment go to the next in line."""
        if waiter.granted.done() and not waiter.granted.cancelled():
            self.give_back(waiter.granted.result())
            return
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._serve()
