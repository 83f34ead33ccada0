"""A tiny random checkpoint: every part of a real one, in a megabyte, for tests and a first demo.

Its answers are noise, but deterministic noise: weights are drawn wider than a trained model's, so
that greedy answers vary and the best token leads by far more than rounding can undo.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

Family = Literal["qwen2_5_vl", "qwen2_vl"]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# What Qwen2.5-VL's template renders for text and images, written anew.
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_TRAINING_TEXT = (
    "A picture and a question go in, and an answer streams out. You are a helpful assistant.",
    "What is in this picture? Describe the image in one sentence. How many are there?",
    "The first image shows a red square, the second a blue circle on a white background.",
    "Compare the two images. Which one is larger? What colour is it? Is it the same as before?",
    "Encode, prefill, decode: three stages, three pools, one token after another.",
    "user\nassistant\nsystem\n",
)


def write_random_checkpoint(path: Path, family: Family = "qwen2_5_vl", seed: int = 0) -> None:
    """Write a checkpoint to the folder `path`: two layers, grouped-query attention, windows.

    The same arguments give the same weights.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _image_processor().save_pretrained(path)
    model = _model(family, tokenizer, seed)
    end_of_turn = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end_of_turn, pad_token_id=end_of_turn[1]
    )
    model.save_pretrained(path)
    _name_input_channels(path / "config.json")


def _tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE like Qwen's, trained on a few sentences."""
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_TRAINING_TEXT, trainer)
    bpe = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(merge) for merge in bpe["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=bpe["vocab"], merges=merges, model_max_length=2048)
    special: Any = [AddedToken(token, special=True) for token in SPECIAL_TOKENS]
    tokenizer.add_tokens(special)
    return tokenizer


def _image_processor() -> Qwen2VLImageProcessorPil:
    # At most 12 x 12 merged patches of 8 x 8 pixels: small enough for a laptop's CPU.
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=16 * 16, max_pixels=96 * 96
    )


def _model(family: Family, tokenizer: Qwen2Tokenizer, seed: int) -> PreTrainedModel:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    common: dict[str, Any] = {
        "text_config": text,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": family == "qwen2_vl",
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, **common))
    else:
        # The first layer attends within windows of 2 x 2 merged patches, the second fully.
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        }
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, **common))
    _randomize(model, seed)
    return model.eval()


@torch.no_grad()
def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Matrices preserve scale, biases and norms vary: every parameter matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
            parameter.copy_(centre + 0.1 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(0.2 * noise)
        else:
            parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)


def _name_input_channels(config_path: Path) -> None:
    """Add the hub checkpoints' name of `in_channels`, which other readers look for."""
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["vision_config"]["in_chans"] = 3
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
