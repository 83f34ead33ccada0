"""The engine's steps: a chunk of a prompt (prefill), one token of every running sequence (decode).

Synchronous and stateless between steps: workers own the queues, the blocks and the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epd.engines.torch.attention import DecodeAttention, PromptAttention
from epd.engines.torch.kv_pool import KVPool
from epd.engines.torch.language_model import LanguageModel
from epd.engines.torch.prompt import Prompt
from epd.engines.torch.sampler import GREEDY, Sampling, sample
from epd.errors import WorkerError


class PrefillModel:
    """Computes prompts; the caller draws the first token (`sample` at position num_tokens)."""

    def __init__(self, model: LanguageModel, pool: KVPool, image_token_id: int) -> None:
        self._model = model
        self._pool = pool
        self._image_token_id = image_token_id

    @property
    def vocab_size(self) -> int:
        return self._model.embed_tokens.num_embeddings

    def prefill(
        self,
        prompt: Prompt,
        image_embeddings: Tensor | None,
        block_ids: Sequence[int],
        chunk_tokens: int,
    ) -> Tensor:
        """Fill `block_ids` with the prompt's KV; the logits after its last token, `[vocab_size]`.

        `image_embeddings` are all images' rows in order, `[num_image_tokens, hidden_size]`.

        Raises:
            WorkerError: the embeddings are not as many as the prompt's image tokens.
        """
        logits = torch.empty(0)
        for start in range(0, len(prompt.token_ids), chunk_tokens):
            logits = self.step(prompt, image_embeddings, block_ids, start, start + chunk_tokens)
        return logits

    @torch.inference_mode()
    def step(
        self,
        prompt: Prompt,
        image_embeddings: Tensor | None,
        block_ids: Sequence[int],
        start: int,
        stop: int,
    ) -> Tensor:
        """Tokens `start` to `stop` (exclusive) of the prompt, after all before them.

        For workers that look up (to abort, or to let others in) between chunks.
        """
        stop = min(stop, len(prompt.token_ids))
        embeddings = self._embed(prompt, image_embeddings, start, stop)
        positions = torch.tensor([axis[start:stop] for axis in prompt.positions])
        attention = PromptAttention(self._pool, block_ids, start, stop)
        hidden = self._model(embeddings, positions.to(self._model.device), attention)
        return self._model.logits(hidden[-1:])[0]

    def _embed(
        self, prompt: Prompt, image_embeddings: Tensor | None, start: int, stop: int
    ) -> Tensor:
        """The chunk's token embeddings, with image rows in the places of image tokens."""
        ids = torch.tensor(prompt.token_ids)
        is_image = ids == self._image_token_id
        is_image[prompt.num_prompt_tokens :] = False
        num_rows = 0 if image_embeddings is None else image_embeddings.shape[0]
        if num_rows != int(is_image.sum()):
            raise WorkerError(
                f"the prompt has {int(is_image.sum())} image tokens, but {num_rows} rows of image "
                "embeddings arrived"
            )
        embeddings = self._model.embed_tokens(ids[start:stop].to(self._model.device))
        if image_embeddings is not None:
            first = int(is_image[:start].sum())
            here = is_image[start:stop]
            rows = image_embeddings[first : first + int(here.sum())]
            embeddings[here.to(embeddings.device)] = rows.to(embeddings.device, embeddings.dtype)
        return embeddings


@dataclass(slots=True)
class DecodeSlot:
    """One running sequence. Its blocks must have room for the token that a step adds."""

    token_id: int
    """The newest token, whose KV is not computed yet."""
    position: int
    """M-RoPE position of the newest token, on all axes."""
    num_tokens: int
    """Tokens in the KV cache, so also the newest token's index in the sequence."""
    block_ids: list[int]
    sampling: Sampling = GREEDY

    def advance(self, token_id: int) -> None:
        """The newest token is in the cache now, and `token_id` follows it."""
        self.token_id = token_id
        self.position += 1
        self.num_tokens += 1


class DecodeBatch:
    """Continuous batching: any slots may run together in a step, and others in the next."""

    def __init__(self, model: LanguageModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    @torch.inference_mode()
    def step(self, slots: Sequence[DecodeSlot]) -> list[int]:
        """Compute every slot's newest token, advance the slots, return the tokens that follow."""
        device = self._model.device
        token_ids = torch.tensor([slot.token_id for slot in slots], device=device)
        positions = torch.tensor([slot.position for slot in slots], device=device).expand(3, -1)
        attention = DecodeAttention(
            self._pool, [slot.block_ids for slot in slots], [slot.num_tokens for slot in slots]
        )
        hidden = self._model(self._model.embed_tokens(token_ids), positions, attention)
        following = sample(
            self._model.logits(hidden),
            [slot.sampling for slot in slots],
            [slot.num_tokens + 1 for slot in slots],
        )
        for slot, token_id in zip(slots, following, strict=True):
            slot.advance(token_id)
        return following
