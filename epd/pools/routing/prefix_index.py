"""Which prompt prefixes each prefill worker is believed to have in its KV cache.

Fed with the prompts that were sent. What a worker evicts is guessed: each has a budget of tokens
and of blocks, and forgets what was used longest ago, leaves first, as SGLang's radix cache does.
An engine that tells what it evicts (SGLang's KV events) makes the guess better: see `shrink` and
`forget`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from epd.types import WorkerId


class Block(NamedTuple):
    """A piece of a prompt: some text, or one image."""

    chain_hash: int
    """Of this block and all before it."""
    num_tokens: int


@dataclass(slots=True)
class _Cache:
    """One worker's blocks: tokens by chain hash, the one used longest ago first."""

    bit: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    num_tokens: int = 0


class PrefixIndex:
    """Blocks by worker, and workers by block.

    Args:
        max_blocks: most blocks remembered of one worker; about 300 bytes each.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._caches: dict[WorkerId, _Cache] = {}
        # A worker is one bit, so that one walk along a prompt finds the prefix of every worker.
        self._by_bit: dict[int, WorkerId] = {}
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks remembered, of all workers."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def add(self, worker_id: WorkerId, blocks: Sequence[Block], *, max_tokens: int) -> None:
        """The worker has a prompt's blocks now, or soon.

        Args:
            worker_id: whose cache it is.
            blocks: the prompt's, in order.
            max_tokens: the most its cache holds; 0 if that is not known.
        """
        cache = self._caches.get(worker_id)
        if cache is None:
            cache = self._caches[worker_id] = _Cache(self._free_bit())
            self._by_bit[cache.bit] = worker_id
        # Backwards: the first block is then the one used last, so that leaves go first.
        for block in reversed(blocks):
            if block.chain_hash in cache.blocks:
                cache.blocks.move_to_end(block.chain_hash)
                continue
            cache.blocks[block.chain_hash] = block.num_tokens
            cache.num_tokens += block.num_tokens
            self._holders[block.chain_hash] = self._holders.get(block.chain_hash, 0) | cache.bit
        while len(cache.blocks) > self._max_blocks or 0 < max_tokens < cache.num_tokens:
            self._drop_oldest(cache)

    def find(self, blocks: Sequence[Block]) -> dict[WorkerId, int]:
        """Tokens of the longest prefix that each worker has; those that have none are left out."""
        found: dict[WorkerId, int] = {}
        holders, num_tokens = -1, 0
        for block in blocks:
            still = holders & self._holders.get(block.chain_hash, 0)
            if still != holders and num_tokens:
                found.update(dict.fromkeys(self._workers(holders ^ still), num_tokens))
            holders = still
            if not holders:
                return found
            num_tokens += block.num_tokens
        if num_tokens:
            found.update(dict.fromkeys(self._workers(holders), num_tokens))
        return found

    def shrink(self, worker_id: WorkerId, num_tokens: int) -> None:
        """The worker has evicted so many tokens."""
        cache = self._caches.get(worker_id)
        while cache is not None and cache.blocks and num_tokens > 0:
            num_tokens -= self._drop_oldest(cache)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker's cache is gone or empty."""
        cache = self._caches.pop(worker_id, None)
        if cache is not None:
            while cache.blocks:
                self._drop_oldest(cache)
            del self._by_bit[cache.bit]

    def _drop_oldest(self, cache: _Cache) -> int:
        """Returns the tokens dropped."""
        chain_hash, num_tokens = cache.blocks.popitem(last=False)
        cache.num_tokens -= num_tokens
        left = self._holders[chain_hash] & ~cache.bit
        if left:
            self._holders[chain_hash] = left
        else:
            del self._holders[chain_hash]
        return num_tokens

    def _free_bit(self) -> int:
        return next(1 << n for n in count() if 1 << n not in self._by_bit)

    def _workers(self, bits: int) -> Iterator[WorkerId]:
        while bits:
            bit = bits & -bits
            yield self._by_bit[bit]
            bits ^= bit
