from __future__ import annotations

from typing import Any

from epd.coordinator.prompt_blocks import prompt_blocks
from epd.pools.routing import Block
from epd.wire import parse_chat_request

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
LONG = "".join(f"word {n} " for n in range(100))  # 790 characters


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def blocks(*messages: dict[str, Any], hashes: str = "", **fields: Any) -> list[Block]:
    request = parse_chat_request({"model": "m", "messages": list(messages), **fields})
    return prompt_blocks(request, list(hashes), dict.fromkeys(hashes, 700))


def num_common(one: list[Block], other: list[Block]) -> int:
    """Blocks before the first that differs; after it none may be equal."""
    pairs = list(zip(one, other, strict=False))
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert not set(one[common:]) & set(other[common:])
    return common


def test_a_prompt_is_cut_into_texts_of_256_characters_and_images() -> None:
    found = blocks(user([text(LONG), IMAGE, text("why?")]), hashes="a")
    assert [block.num_tokens for block in found] == [64, 64, 64, 6, 700, 1]


def test_the_next_turn_of_a_conversation_begins_with_the_last() -> None:
    turns = [user([IMAGE, text("what is it?")]), {"role": "assistant", "content": "a cat"}]
    first = blocks(turns[0], hashes="a")
    assert num_common(first, blocks(*turns, user("why?"), hashes="a")) == len(first) == 2


def test_equal_texts_are_told_apart_by_where_they_differ_first() -> None:
    one = blocks(user(LONG))
    assert num_common(one, blocks(user(LONG))) == 4
    assert num_common(one, blocks(user(LONG[:300] + "!" + LONG[301:]))) == 1
    assert num_common(one, blocks(user("!" + LONG[1:]))) == 0


def test_images_are_known_by_content_and_place() -> None:
    one = blocks(user([text("a"), IMAGE, IMAGE]), hashes="ab")
    assert num_common(one, blocks(user([text("a"), IMAGE, IMAGE]), hashes="ac")) == 2
    assert num_common(one, blocks(user([text("a"), IMAGE, IMAGE]), hashes="ba")) == 1
    assert num_common(one, blocks(user([IMAGE, text("a"), IMAGE]), hashes="ab")) == 0


def test_another_role_model_or_tool_is_another_prompt() -> None:
    one = blocks(user("hi"))
    assert num_common(one, blocks({"role": "system", "content": "hi"})) == 0
    assert num_common(one, blocks(user("hi"), model="n")) == 0
    assert num_common(one, blocks(user("hi"), tools=[{"type": "function"}])) == 0
    assert num_common(one, blocks(user("hi"), temperature=1)) == 1


def test_a_message_without_content_has_no_blocks() -> None:
    assert len(blocks(user("hi"), {"role": "assistant", "content": None})) == 1


def test_a_text_too_long_for_any_context_makes_few_blocks() -> None:
    found = blocks(user("x" * 2**23))
    assert len(found) == 4097
    assert sum(block.num_tokens for block in found) == 2**21
