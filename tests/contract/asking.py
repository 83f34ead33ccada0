"""Questions, and the answers that an engine must give: transformers', or the simulated words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import openai
from PIL import Image

from epd.engines.sim import Profile
from epd.engines.sim.answer import build_answer
from epd.engines.sim.prompt import prompt_seed
from epd.wire import parse_chat_request
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


class Expectation(Protocol):
    def answer(self, images: Sequence[Image.Image], text: str = QUESTION) -> str: ...


class SimulatedWords:
    """What the sim engine answers, from the request alone."""

    def answer(self, images: Sequence[Image.Image], text: str = QUESTION) -> str:
        body = request(images, text)
        for part, image in zip(body["messages"][0]["content"], images, strict=False):
            part["image_url"]["content_hash"] = hashlib.sha256(encoded(image)).hexdigest()
        profile = Profile()
        seed = prompt_seed(parse_chat_request(body), profile.seed)
        return build_answer(seed, profile.answer, max_new_tokens=NUM_TOKENS, stop_strings=[]).text


class Transformers:
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
