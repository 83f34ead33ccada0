"""The other side of the slice benchmark: plain transformers on the same questions."""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_PLACEHOLDER = "<|image_pad|>"


@dataclass(frozen=True, slots=True)
class Question:
    """One picture and a question, in the form either side takes."""

    picture: bytes
    """A PNG file."""
    text: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        url = f"data:image/png;base64,{base64.b64encode(self.picture).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [image, {"type": "text", "text": self.text}]}]


def draw_questions(num: int, *, seed: int, max_tokens: int) -> list[Question]:
    """`num` questions about 224x224 pictures of coloured boxes; the same for the same seed."""
    rng = random.Random(seed)
    questions: list[Question] = []
    for number in range(num):
        image = Image.new("RGB", (224, 224), "white")
        draw = ImageDraw.Draw(image)
        for _ in range(5):
            x, y = rng.randrange(200), rng.randrange(200)
            colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
            draw.rectangle((x, y, x + 40, y + 40), fill=colour)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        text = f"Question {number} of {num}: what is in this picture?"
        questions.append(Question(buffer.getvalue(), text, max_tokens))
    return questions


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered question."""

    ttft_s: float
    e2e_s: float
    num_tokens: int
    text: str


class _FirstToken(BaseStreamer):
    """Notes when `generate` gives its first token; the prompt comes first."""

    def __init__(self) -> None:
        self.num_puts = 0
        self.first_s = 0.0

    def put(self, value: object) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass


class TransformersReference:
    """A loaded checkpoint that answers questions one at a time, in this process."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(path)

    def ask(self, question: Question) -> Timing:
        """Answer greedily; preparing the input counts, as it does on the served path."""
        began_s = time.perf_counter()
        inputs = self._inputs(question)
        streamer = _FirstToken()
        output = self._model.generate(
            **inputs, max_new_tokens=question.max_tokens, do_sample=False, streamer=streamer
        )
        answer: Sequence[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return Timing(
            ttft_s=streamer.first_s - began_s,
            e2e_s=time.perf_counter() - began_s,
            num_tokens=len(answer),
            text=text,
        )

    def _inputs(self, question: Question) -> dict[str, Any]:
        image = Image.open(io.BytesIO(question.picture)).convert("RGB")
        pixels = self._processor(images=[image], return_tensors="pt")
        num_tokens = int(pixels["image_grid_thw"].prod()) // self._processor.merge_size**2
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        ).replace(_PLACEHOLDER, _PLACEHOLDER * num_tokens)
        ids = self._tokenizer(prompt, return_tensors="pt")
        kinds = (ids["input_ids"] == self._model.config.image_token_id).int()
        return {**ids, **pixels, "mm_token_type_ids": kinds}
