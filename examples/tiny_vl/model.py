"""The architecture of the tiny model, and a forward pass of it that is fast on a CPU.

The weights live in transformers' own `Qwen2_5_VLForConditionalGeneration`; nothing is added to
it. The functions here compute the same outputs as its `forward` (a test compares the two) for
batches in which every picture has the same size, in bfloat16, without its loop over pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

PATCH_PX = 14
MERGE = 2
MROPE_SECTION = (8, 12, 12)
TEXT_ROPE_THETA = 100.0
"""Small, so that neighbouring image tokens differ visibly even in the slowest (width) section."""

_HIDDEN = 256
_VISION_HIDDEN = 128
_VISION_DEPTH = 5
_NORM_EPS = 1e-6


def build_config(vocab_size: int, token_ids: dict[str, int]) -> Qwen2_5_VLConfig:
    """3.8 million parameters: 1.6 in the vision tower, 2.2 in the language model."""
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=True,
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": _HIDDEN,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "max_window_layers": 4,
            "rms_norm_eps": _NORM_EPS,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token_ids["<|im_end|>"],
            "pad_token_id": token_ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": TEXT_ROPE_THETA,
                "mrope_section": list(MROPE_SECTION),
            },
        },
        vision_config={
            "depth": _VISION_DEPTH,
            "hidden_size": _VISION_HIDDEN,
            "intermediate_size": 352,
            "num_heads": 4,
            "out_hidden_size": _HIDDEN,
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "in_chans": 3,
            "window_size": 112,
            "fullatt_block_indexes": list(range(_VISION_DEPTH)),
        },
    )


def build_model(config: Qwen2_5_VLConfig, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Fresh weights; what writes to the residual stream starts small (GPT-2's rule)."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        fan_in = parameter[0].numel()
        std = 0.02 if "embed_tokens" in name else fan_in**-0.5
        if name.endswith(("o_proj.weight", "attn.proj.weight", "down_proj.weight")):
            std *= (2 * _VISION_DEPTH) ** -0.5
        nn.init.normal_(parameter, std=std)
    return model


def vision_forward(
    model: Qwen2_5_VLForConditionalGeneration, patches: Tensor, is_compiled: bool = True
) -> Tensor:
    """Encodes pictures of one size.

    Args:
        model: Whose vision tower to run; fp32 weights, cast to the dtype of `patches`.
        patches: [num_images, rows, columns, 4, 588], one still frame, normalised; rows and
            columns of merged cells, in each the patches of its 2 x 2 square.
        is_compiled: Fuse the small operations; the first call takes a minute then.

    Returns:
        [num_images, rows * columns, hidden], image tokens in reading order.
    """
    visual = model.model.visual
    num_images, rows, columns = patches.shape[:3]
    # The two frames of a still picture are equal, so the two kernels can be added first.
    kernel = visual.patch_embed.proj.weight.sum(dim=2).flatten(1).to(patches.dtype)
    x = F.linear(patches.reshape(num_images, rows * columns * 4, -1), kernel)
    cos, sin = _vision_rope(rows, columns, visual.blocks[0].attn.head_dim, x.dtype)
    run = _compiled(_vision_block) if is_compiled else _vision_block
    for block in visual.blocks:
        x = run(block, x, cos, sin)
    merger = visual.merger
    x = _norm(x, merger.ln_q.weight).view(num_images, rows * columns, -1)
    return _linear(F.gelu(_linear(x, merger.mlp[0])), merger.mlp[2])


def language_forward(
    model: Qwen2_5_VLForConditionalGeneration,
    x: Tensor,
    positions: Tensor,
    mask: Tensor,
    is_compiled: bool = True,
) -> Tensor:
    """Runs the language model.

    Args:
        model: fp32 weights, cast to the dtype of `x`.
        x: [batch, length, hidden], text and image embeddings.
        positions: [3, batch, length], int; time, row and column of each token.
        mask: [batch, 1, length, length], fp32; added to the attention scores.
        is_compiled: As in `vision_forward`.

    Returns:
        [batch, length, hidden] after the last norm.
    """
    language = model.model.language_model
    cos, sin = _text_rope(positions, language.layers[0].self_attn.head_dim, x.dtype)
    run = _compiled(_text_block) if is_compiled else _text_block
    for layer in language.layers:
        x = run(layer, x, cos, sin, mask)
    return _norm(x, language.norm.weight)


@lru_cache(maxsize=2)
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + _NORM_EPS) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Plain matrix products: on a CPU with bf16 units 5 x the speed of the fused kernel."""
    scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    mixed = scores.softmax(dim=-1).to(value.dtype) @ value
    return mixed.transpose(1, 2).flatten(2)


def _vision_block(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attn = block.attn
    batch, length, width = x.shape
    qkv = _linear(_norm(x, block.norm1.weight), attn.qkv)
    qkv = qkv.view(batch, length, 3, attn.num_heads, width // attn.num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = _attend(_rotate(query, cos, sin), _rotate(key, cos, sin), value, None)
    x = x + _linear(mixed, attn.proj)
    return x + _gated(block.mlp, _norm(x, block.norm2.weight))


def _text_block(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    attn = layer.self_attn
    batch, length, _ = x.shape
    h = _norm(x, layer.input_layernorm.weight)
    query, key, value = (
        _linear(h, projection).view(batch, length, -1, attn.head_dim).transpose(1, 2)
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    key = _rotate(key, cos, sin).repeat_interleave(attn.num_key_value_groups, dim=1)
    value = value.repeat_interleave(attn.num_key_value_groups, dim=1)
    x = x + _linear(_attend(_rotate(query, cos, sin), key, value, mask), attn.o_proj)
    return x + _gated(layer.mlp, _norm(x, layer.post_attention_layernorm.weight))


def _gated(mlp: nn.Module, h: Tensor) -> Tensor:
    return _linear(F.silu(_linear(h, mlp.gate_proj)) * _linear(h, mlp.up_proj), mlp.down_proj)


@lru_cache(maxsize=512)
def _vision_rope(
    rows: int, columns: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cos and sin, [rows * columns * 4, head_dim]; patches cell by cell, as the pixels come."""
    row = torch.arange(rows * MERGE).view(rows, 1, MERGE, 1).expand(-1, columns, -1, MERGE)
    column = torch.arange(columns * MERGE).view(1, columns, 1, MERGE).expand(rows, -1, MERGE, -1)
    frequency = 1.0 / 10000.0 ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    angles = torch.cat([axis.reshape(-1, 1) * frequency for axis in (row, column)], dim=-1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _text_rope(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin, [batch, 1, length, head_dim]; each section of frequencies follows one axis."""
    frequency = 1.0 / TEXT_ROPE_THETA ** (torch.arange(0, head_dim, 2).float() / head_dim)
    axis = torch.repeat_interleave(torch.arange(3), torch.tensor(MROPE_SECTION))
    angles = positions[axis].permute(1, 2, 0).float() * frequency
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
