"""Writes a checkpoint in the layout of the Hugging Face hub."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)

from epd.checkpoints.scenes import MAX_PIXELS, MIN_PIXELS
from examples.tiny_vl.batches import MEAN, STD
from examples.tiny_vl.model import MERGE, PATCH_PX


def save_checkpoint(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, out: Path
) -> None:
    """Stores the weights in bfloat16, and all that a server needs beside them."""
    # A context that cannot be extended by mistake: generation ends at the end of the turn.
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    saved = copy.deepcopy(model).to(torch.bfloat16)
    # A model that was loaded in fp32 to train on says so here too.
    saved.config.text_config.dtype = saved.config.vision_config.dtype = None
    saved.save_pretrained(out)
    # save_pretrained leaves the weights readable to their owner only; the wheel would keep that.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "patch_size": PATCH_PX,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
    }
    text = json.dumps(processor, indent=2) + "\n"
    (out / "preprocessor_config.json").write_text(text, encoding="utf-8")
