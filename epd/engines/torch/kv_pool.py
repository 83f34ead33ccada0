"""The paged KV cache: which blocks are free, and where a token's keys and values lie.

A pool owns the bookkeeping, not the memory: the caller supplies one flat byte buffer, so that it
can register the buffer with the transfer engine. Everything of one block, all layers, keys and
values, is one contiguous range of bytes, and that range is the unit of a hand-off.

Not thread-safe: one thread allocates, frees and computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one block: `[num_layers, 2, block_tokens, num_kv_heads, head_dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * self.block_tokens * self.dtype.itemsize

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where tokens lie: the same shape of block ids and of offsets within the block, int64."""

    block_ids: Tensor
    offsets: Tensor


class KVPool:
    """Blocks in `buffer` (`[num_bytes], uint8`, any device, owned by the caller).

    Attributes:
        buffer: the memory; block i starts at byte `i * shape.block_bytes`.
        num_blocks: how many whole blocks fit.
    """

    def __init__(self, buffer: Tensor, shape: KVShape) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError("the KV buffer must be flat, contiguous and of dtype uint8")
        self.buffer = buffer
        self.shape = shape
        self.num_blocks = buffer.numel() // shape.block_bytes
        # [num_blocks, num_layers, 2, block_tokens, num_kv_heads, head_dim]
        self._blocks = (
            buffer[: self.num_blocks * shape.block_bytes]
            .view(shape.dtype)
            .view(
                self.num_blocks,
                shape.num_layers,
                2,
                shape.block_tokens,
                shape.num_kv_heads,
                shape.head_dim,
            )
        )
        # Taken from the end, so a fresh pool hands out 0, 1, 2, …
        self._free = list(reversed(range(self.num_blocks)))
        self._used: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return len(self._used)

    @property
    def max_tokens(self) -> int:
        """Tokens that fit in the whole pool."""
        return self.num_blocks * self.shape.block_tokens

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Ids of enough blocks for `num_tokens` tokens, or None when they are not free now.

        The blocks hold what their last owner left there.
        """
        num_blocks = self.shape.num_blocks(num_tokens)
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._used.update(block_ids)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is not allocated, or named twice; then none is freed.
        """
        returned = list(block_ids)
        if len(set(returned)) != len(returned) or not self._used.issuperset(returned):
            raise ValueError(f"blocks freed twice or never allocated, among {returned}")
        self._used.difference_update(returned)
        self._free.extend(reversed(returned))

    def block_offset(self, block_id: int) -> int:
        """Where the block starts in `buffer`, in bytes."""
        return block_id * self.shape.block_bytes

    def block(self, block_id: int) -> Tensor:
        """The block's memory: `[block_bytes], uint8`, a view of `buffer`."""
        start = self.block_offset(block_id)
        return self.buffer[start : start + self.shape.block_bytes]

    def locate(self, block_table: Tensor, tokens: Tensor) -> TokenSlots:
        """Slots of token numbers (`[..., n]`) under a block table (`[..., num_blocks]`)."""
        block_tokens = self.shape.block_tokens
        block_ids = block_table.gather(-1, tokens // block_tokens)
        return TokenSlots(block_ids, tokens % block_tokens)

    def write(self, layer_id: int, slots: TokenSlots, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (`[*slots, num_kv_heads, head_dim]`)."""
        self._blocks[:, layer_id, 0][slots.block_ids, slots.offsets] = keys
        self._blocks[:, layer_id, 1][slots.block_ids, slots.offsets] = values

    def gather(self, layer_id: int, slots: TokenSlots) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values at `slots` (`[*slots, num_kv_heads, head_dim]`)."""
        keys = self._blocks[:, layer_id, 0][slots.block_ids, slots.offsets]
        values = self._blocks[:, layer_id, 1][slots.block_ids, slots.offsets]
        return keys, values
