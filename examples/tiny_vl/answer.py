"""Answers questions with transformers alone: the yardstick of what the served model should say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

Message: TypeAlias = dict[str, Any]
"""A chat message in the form of the chat template; a picture is `{"type": "image"}`."""


class Answerer:
    """A checkpoint in fp32 on the CPU, one greedy answer at a time."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        # The processor of Pillow: the other one needs torchvision.
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        self._model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self._model.eval()

    def answer(self, images: Sequence[Image.Image], prompt: str) -> str:
        """The answer to one question, pictures first, with the template's own system message."""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
        return self.reply(images, [{"role": "user", "content": content}])

    @torch.no_grad()
    def reply(self, images: Sequence[Image.Image], messages: Sequence[Message]) -> str:
        """The next message of a chat; `images` in the order in which `messages` show them."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        inputs: dict[str, torch.Tensor] = {}
        if images:
            seen = self._processor(images=list(images), return_tensors="pt")
            inputs = {
                "pixel_values": seen["pixel_values"],
                "image_grid_thw": seen["image_grid_thw"],
            }
            for _, rows, columns in seen["image_grid_thw"].tolist():
                text = text.replace("<|image_pad|>", "<|hole|>" * (rows * columns // 4), 1)
            text = text.replace("<|hole|>", "<|image_pad|>")
        ids = self._tokenizer(text, return_tensors="pt").input_ids
        is_image = (ids == self._model.config.image_token_id).int()
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=is_image,
            max_new_tokens=32,
            **inputs,
        )
        return self._tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
