"""The Qwen2 language model as prefill and decode run it: a flat row of tokens over a paged cache.

One row may be a chunk of one prompt or a token of each of many sequences; only `Attention` knows
which. Module names are those of the checkpoint, so that loading is a plain name match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from epd.engines.torch.attention import Attention
from epd.engines.torch.kv_pool import BLOCK_TOKENS, KVShape
from epd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LanguageConfig:
    """What the language model needs of a checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    max_position_embeddings: int
    has_tied_embeddings: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> LanguageConfig:
        """Read either shape: transformers 5's nested `text_config` or the hub's older flat one.

        Raises:
            ConfigError: a key is missing, or asks for something this model does not do.
        """
        text = cast("Mapping[str, Any]", config.get("text_config") or config)
        rope = cast(
            "Mapping[str, Any]", text.get("rope_parameters") or text.get("rope_scaling") or {}
        )
        _refuse_unsupported(text, rope)
        try:
            return cls(
                vocab_size=text["vocab_size"],
                hidden_size=text["hidden_size"],
                intermediate_size=text["intermediate_size"],
                num_layers=text["num_hidden_layers"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
                rms_norm_eps=text["rms_norm_eps"],
                # Defaults of transformers 5.19, models/qwen2_5_vl (config and rotary embedding).
                rope_theta=rope.get("rope_theta") or text.get("rope_theta") or 1_000_000.0,
                mrope_section=tuple(rope.get("mrope_section") or (16, 24, 24)),
                max_position_embeddings=text["max_position_embeddings"],
                has_tied_embeddings=bool(
                    config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
                ),
            )
        except KeyError as exc:
            raise ConfigError(f"config.json lacks {exc.args[0]}") from exc

    def kv_shape(self, dtype: torch.dtype, block_tokens: int = BLOCK_TOKENS) -> KVShape:
        """The blocks this model's KV cache is made of."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_tokens)


def _refuse_unsupported(text: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "mrope"):
        raise ConfigError(f"config.json: rope type {rope_type!r} is not supported by this engine")
    if text.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window is not supported by this engine")
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {text['hidden_act']!r} is not supported")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class MRoPE:
    """Rotary angles of positions on three axes (Qwen2-VL paper, section 2.1).

    The frequencies are split into sections that take time, height and width in turn.
    """

    def __init__(self, config: LanguageConfig) -> None:
        if 2 * sum(config.mrope_section) != config.head_dim:
            raise ConfigError(
                f"config.json: mrope_section {list(config.mrope_section)} must sum to half of "
                f"the head dimension {config.head_dim}"
            )
        self._config = config

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[num_tokens, 1, head_dim]`, for positions `[3, num_tokens]`."""
        dim = self._config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float, device=positions.device) / dim
        angles = positions[..., None].float() * (1.0 / self._config.rope_theta**exponents)
        sections = angles.split(self._config.mrope_section, dim=-1)
        half = torch.cat([section[i % 3] for i, section in enumerate(sections)], dim=-1)
        full = torch.cat([half, half], dim=-1)[:, None]
        return full.cos().to(dtype), full.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary angles; dimension i is paired with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, config: LanguageConfig, layer_id: int) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.layer_id = layer_id
        self.head_dim = head_dim
        self.q_proj = nn.Linear(size, config.num_heads * head_dim)
        self.k_proj = nn.Linear(size, config.num_kv_heads * head_dim)
        self.v_proj = nn.Linear(size, config.num_kv_heads * head_dim)
        self.o_proj = nn.Linear(config.num_heads * head_dim, size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads = (hidden.shape[0], -1, self.head_dim)
        queries = rotate(self.q_proj(hidden).view(heads), cos, sin)
        keys = rotate(self.k_proj(hidden).view(heads), cos, sin)
        values = self.v_proj(hidden).view(heads)
        return self.o_proj(attention(self.layer_id, queries, keys, values))


class MLP(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    def __init__(self, config: LanguageConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LanguageModel(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = MRoPE(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def forward(self, embeddings: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Final hidden states `[num_tokens, hidden_size]`.

        `embeddings` are `[num_tokens, hidden_size]`, `positions` `[3, num_tokens]`, int64. Keys and
        values go to the pool behind `attention`.
        """
        cos, sin = self.rope(positions, embeddings.dtype)
        hidden = embeddings
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, `[n, vocab_size], fp32`, after `hidden`, `[n, hidden_size]`."""
        return self.lm_head(hidden).float()
