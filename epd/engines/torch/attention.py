"""Attention over the KV pool, in the two shapes an engine step has.

`PromptAttention` runs a chunk of one sequence's prompt, `DecodeAttention` one token of each of many
sequences. Both are made per step and called once per layer. Only slots that hold a token of the
same sequence are ever read, so what other requests left in the pool cannot leak in (not even as
NaN, which a mask would not stop).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from epd.engines.torch.kv_pool import KVPool


class Attention(Protocol):
    """Stores the step's keys and values, then attends to all of them that each token may see."""

    def __call__(self, layer_id: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer's attention.

        `queries` are `[num_tokens, num_heads, head_dim]`, `keys` and `values`
        `[num_tokens, num_kv_heads, head_dim]`; the result is `[num_tokens, num_heads * head_dim]`.
        """
        ...


class PromptAttention:
    """Tokens `start` to `stop` (exclusive) of one sequence; those before are in the pool."""

    def __init__(self, pool: KVPool, block_ids: Sequence[int], start: int, stop: int) -> None:
        device = pool.buffer.device
        table = torch.tensor(block_ids, device=device)
        tokens = torch.arange(stop, device=device)
        self._pool = pool
        self._seen = pool.locate(table, tokens)
        self._new = pool.locate(table, tokens[start:])
        # Without a past the mask is the plain causal one, for which kernels have a fast path.
        self._mask = None if start == 0 else tokens[None, :] <= tokens[start:, None]

    def __call__(self, layer_id: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._pool.write(layer_id, self._new, keys, values)
        if self._mask is not None:
            keys, values = self._pool.gather(layer_id, self._seen)
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).flatten(1)


class DecodeAttention:
    """The newest token of each sequence; `num_tokens[i]` earlier ones of it are in the pool."""

    def __init__(
        self, pool: KVPool, block_ids: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> None:
        device = pool.buffer.device
        longest = max(len(ids) for ids in block_ids)
        # The padding is never read: token numbers stop at the sequence's own last token.
        table = torch.tensor(
            [[*ids, *[0] * (longest - len(ids))] for ids in block_ids], device=device
        )
        newest = torch.tensor(num_tokens, device=device)[:, None]
        tokens = torch.arange(max(num_tokens) + 1, device=device)
        self._pool = pool
        self._seen = pool.locate(table, tokens.minimum(newest))
        self._new = pool.locate(table, newest)
        self._mask = (tokens <= newest)[:, None, None, :]

    def __call__(self, layer_id: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._pool.write(layer_id, self._new, keys[:, None], values[:, None])
        keys, values = self._pool.gather(layer_id, self._seen)
        attended = scaled_dot_product_attention(
            queries[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._mask,
            enable_gqa=True,
        )
        return attended.flatten(1)
