"""Choosing the next token. The draw depends only on the request's seed and the token's position.

So a request's tokens do not depend on its batch mates, and another worker that takes the sequence
over (decode after prefill, or a retry) goes on with the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. Defaults are OpenAI's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0


GREEDY = Sampling(temperature=0.0)
_MIN_TEMPERATURE = 1e-5  # below, dividing the logits would overflow; the result is greedy anyway


def sample(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token per row of `logits` (`[num_rows, vocab_size], fp32`).

    `positions[i]` is the index, in its sequence, of the token to draw; for the first token of an
    answer that is the number of prompt tokens.
    """
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, how in enumerate(sampling):
        if how.temperature > _MIN_TEMPERATURE:
            token_ids[row] = _draw(logits[row], how, uniform(how.seed, positions[row]))
    return token_ids


def _draw(logits: Tensor, how: Sampling, chance: float) -> int:
    """Invert the cumulative distribution at `chance`."""
    # On the CPU and in double precision, so that the same logits give the same token anywhere.
    probs = (logits.double().cpu() / how.temperature).softmax(dim=-1)
    token_ids: Tensor | None = None
    if how.top_k or how.top_p < 1:
        probs, token_ids = _most_likely(probs, how)
    cumulative = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, chance * float(cumulative[-1]), right=True))
    return index if token_ids is None else int(token_ids[index])


def _most_likely(probs: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that top_k and top_p leave: their probabilities and their ids."""
    # Sorting a whole vocabulary takes tens of milliseconds. All tokens up to this bound together
    # weigh at most 1 - top_p, so top_p leaves none of them.
    bound = (1 - how.top_p) / probs.numel()
    token_ids = (probs > bound).nonzero()[:, 0]
    probs, order = probs[token_ids].sort(descending=True, stable=True)
    token_ids = token_ids[order]
    # A token stays if those before it do not yet reach top_p; the first always does.
    before = probs.cumsum(dim=-1) - probs
    num_kept = max(1, int((before < how.top_p).sum()))
    if how.top_k:
        num_kept = min(num_kept, how.top_k)
    return probs[:num_kept], token_ids[:num_kept]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that looks random but is a function of its arguments, on any machine.

    It has 52 bits, so that its product with any double is less than that double.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 12) / 2**52
