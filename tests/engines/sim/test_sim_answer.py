"""Prompts as pseudo-tokens, and the words that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from epd.engines.sim.answer import SimAnswer, build_answer, token_id_after
from epd.engines.sim.profile import AnswerProfile
from epd.engines.sim.prompt import SimPrompt, build_prompt, prompt_seed
from epd.wire import ChatRequest

LENGTHS = AnswerProfile(min_tokens=10, max_tokens=20)
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/1", "content_hash": "sha256:ab"}}


def chat(*parts: dict[str, Any] | str, **fields: Any) -> ChatRequest:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return ChatRequest.model_validate(
        {"model": "sim", "messages": [{"role": "user", "content": content}], **fields}
    )


def prompt(request: ChatRequest, *image_tokens: int) -> SimPrompt:
    return build_prompt(request, image_tokens, chars_per_token=4, block_tokens=16)


def answer(seed: int = 1, max_new_tokens: int = 100, **fields: Any) -> SimAnswer:
    return build_answer(
        seed, LENGTHS, max_new_tokens=max_new_tokens, **{"stop_strings": [], **fields}
    )


def test_equal_beginnings_have_equal_blocks_up_to_the_difference() -> None:
    text = "0123456789abcdef" * 8
    one, two = (prompt(chat(IMAGE, text + end * 128), 100) for end in "xy")
    pairs = list(zip(one.block_hashes, two.block_hashes, strict=True))
    num_equal = [a == b for a, b in pairs].index(False)
    # 100 image tokens, their marks, the role and 32 tokens of text.
    assert num_equal == (100 + 2 + 2 + 32) // 16
    assert all(a != b for a, b in pairs[num_equal:]), "a hash covers all that comes before"
    other_image = {"type": "image_url", "image_url": {**IMAGE["image_url"], "content_hash": "cd"}}
    assert prompt(chat(other_image, text), 100).block_hashes[0] != one.block_hashes[0]
    assert one.num_tokens - prompt(chat(IMAGE, text + "x" * 128), 90).num_tokens == 10


def test_the_answer_depends_on_what_is_asked_and_on_nothing_else() -> None:
    def seed(url: str = "http://x/1", text: str = "hi", **fields: Any) -> int:
        image = {"type": "image_url", "image_url": {"url": url, "content_hash": "sha256:ab"}}
        return prompt_seed(chat(image, text, **fields), 7)

    again = seed("http://y/2?expires=3", rid="r", bootstrap_room=5, max_tokens=3, stream=True)
    assert again == seed()
    others = {seed(text="ho"), seed(seed=1), prompt_seed(chat("hi"), 7), prompt_seed(chat("hi"), 8)}
    assert len(others | {seed()}) == 5
    assert 0 <= seed() < 2**63


def test_words_are_numbered_and_a_longer_limit_only_adds_some() -> None:
    full = answer(max_new_tokens=1000)
    assert 10 <= full.num_tokens <= 20
    assert full.finish_reason == "stop"
    short = answer(max_new_tokens=5)
    assert (short.num_tokens, short.finish_reason) == (5, "length")
    assert full.pieces[:5] == short.pieces
    assert [piece.strip(" abcdefghijklmnopqrstuvwxyz") for piece in short.pieces] == list("12345")
    assert short.pieces == answer(max_new_tokens=5).pieces
    assert short.pieces != answer(seed=2, max_new_tokens=5).pieces
    assert token_id_after(1, []) != token_id_after(2, [])
    assert answer(max_new_tokens=50, ignores_eos=True).num_tokens == 50


@pytest.mark.parametrize("start", range(0, 40, 7))
def test_a_stop_string_ends_the_answer_before_it_wherever_it_lies(start: int) -> None:
    full = answer()
    stop = full.text[start : start + 6]
    cut = answer(stop_strings=["not in it", stop])
    assert cut.text == full.text.split(stop)[0]
    assert cut.finish_reason == "stop"
    assert len("".join(full.pieces[: cut.num_tokens])) >= start + 6
    assert len("".join(full.pieces[: cut.num_tokens - 1])) < start + 6
