"""The KV memory of a simulated worker: blocks that requests hold, and prefixes cached in the rest.

Nothing is stored, only counted. A block whose content is known by its hash can be held by several
requests at once, and stays as a cache when the last lets go, least recently used first to leave.
Used on the event loop only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from epd.clock import Clock
from epd.errors import OverloadedError
from epd.transfer import WaitingLine


@dataclass(frozen=True, slots=True)
class _Want:
    num_blocks: int
    block_hashes: Sequence[bytes]


@dataclass(slots=True, eq=False)
class KVHold:
    """What a request holds."""

    known: list[bytes]
    """Hashes of blocks that others may share, from the prompt's start on."""
    num_private: int
    """Blocks of its own."""
    num_hit: int
    """Blocks that were there when it came."""


class KVCache:
    """`capacity_tokens` of KV in blocks of `block_tokens`."""

    def __init__(self, capacity_tokens: int, block_tokens: int, clock: Clock) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = capacity_tokens // block_tokens
        self._num_private = 0
        self._held = Counter[bytes]()
        self._cached = OrderedDict[bytes, None]()
        self._line = WaitingLine[_Want, KVHold](
            take=self._take, put_back=self._put_back, clock=clock
        )

    @property
    def max_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def num_held_blocks(self) -> int:
        """Blocks in requests' hands."""
        return self._num_private + len(self._held)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_held_tokens(self) -> int:
        return self.num_held_blocks * self.block_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens for which requests wait."""
        return sum(want.num_blocks for want in self._line.wants) * self.block_tokens

    async def hold(
        self, num_tokens: int, block_hashes: Sequence[bytes], timeout_s: float
    ) -> KVHold:
        """Room for `num_tokens`, in order of arrival. Safe to cancel.

        Args:
            num_tokens: prompt, and answer where it is computed here.
            block_hashes: of the prompt's full blocks; those that are cached are shared.
            timeout_s: how long to wait for room.

        Raises:
            OverloadedError: no room within `timeout_s`.
        """
        want = _Want(-(-num_tokens // self.block_tokens), block_hashes)
        try:
            return await self._line.take(want, timeout_s)
        except TimeoutError:
            raise OverloadedError(
                f"no KV cache room for {num_tokens} tokens within {timeout_s:g} s",
                retry_after_s=1.0,
            ) from None

    def publish(self, hold: KVHold, block_hashes: Sequence[bytes]) -> None:
        """The prompt is computed: its full blocks can be shared from now on."""
        for block_hash in block_hashes[len(hold.known) :]:
            hold.num_private -= 1
            self._num_private -= 1
            hold.known.append(block_hash)
            self._pin(block_hash)

    def release(self, hold: KVHold) -> None:
        """The request is done; what it shared stays cached while there is room."""
        self._line.give_back(hold)

    def _take(self, want: _Want) -> KVHold | None:
        known: list[bytes] = []
        for block_hash in want.block_hashes:
            if block_hash not in self._held and block_hash not in self._cached:
                break
            known.append(block_hash)
        num_private = want.num_blocks - len(known)
        num_idle = len(self._cached) - sum(block_hash in self._cached for block_hash in known)
        num_free = self.num_blocks - self.num_held_blocks - len(self._cached)
        if num_private > num_free + num_idle:
            return None
        for block_hash in known:
            self._pin(block_hash)
        for _ in range(num_private - num_free):
            self._cached.popitem(last=False)
        self._num_private += num_private
        return KVHold(known, num_private, len(known))

    def _put_back(self, hold: KVHold) -> None:
        self._num_private -= hold.num_private
        # The end of a prompt is of no use without its beginning, so it must leave first.
        for block_hash in reversed(hold.known):
            self._held[block_hash] -= 1
            if not self._held[block_hash]:
                del self._held[block_hash]
                self._cached[block_hash] = None

    def _pin(self, block_hash: bytes) -> None:
        self._held[block_hash] += 1
        self._cached.pop(block_hash, None)
