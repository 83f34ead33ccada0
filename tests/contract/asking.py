"""Questions to the bundled model, and what transformers answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from PIL import Image

from tests.e2e.pictures import encoded, picture, user
from tests.reference import Case, Reference

NUM_TOKENS = 16
QUESTION = "What is in this picture?"


def pictures(num_images: int, seed: int = 0) -> list[Image.Image]:
    return [picture(84 + 28 * i, 112, seed + i) for i in range(num_images)]


def request(images: Sequence[Image.Image], text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny-vl",
        "messages": [user(*(encoded(image) for image in images), text)],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        **fields,
    }


def whole(client: openai.OpenAI, body: dict[str, Any]) -> str:
    answer = client.chat.completions.create(**body)
    return str(answer.choices[0].message.content)


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> str:
    chunks = client.chat.completions.create(**body, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


class Expectation:
    """transformers' greedy answers, ended where a served answer ends."""

    def __init__(self, checkpoint: Path) -> None:
        self._reference = Reference(checkpoint)
        ends = ("<|im_end|>", "<|endoftext|>")
        self._ends = set(self._reference.tokenizer.convert_tokens_to_ids(list(ends)))

    def answer(self, images: Sequence[Image.Image], text: str = QUESTION) -> str:
        parts: list[str | None] = [*([None] * len(images)), text]
        from tests.reference import user as placeholders

        tokens = self._reference.generate(Case([placeholders(*parts)], list(images)), NUM_TOKENS)
        end = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        return str(self._reference.tokenizer.decode(tokens[:end], skip_special_tokens=True))
