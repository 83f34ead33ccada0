"""Parsing a chat request: what is kept, and which field a mistake is blamed on."""

import json
from typing import Any

import pytest

from epd.errors import BadRequestError
from epd.wire import load_json, parse, parse_chat_request
from epd.wire.handoff import EncodeRequest, RoomSendRequest
from epd.wire.workers import WorkerReport

IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
REPORT = {
    "worker_id": "encode-0",
    "epoch": 1,
    "stage": "encode",
    "engine": "torch",
    "state": "ready",
    "url": "http://127.0.0.1:1",
    "model": {"model_id": "m", "model_type": "qwen2_5_vl", "context_tokens": 100},
}
TEXT = {"type": "text", "text": "what is it?"}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def of(content: Any, role: str = "user") -> dict[str, Any]:
    return request(messages=[{"role": "user", "content": "hi"}, {"role": role, "content": content}])


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "model"),
        (request(model=""), "model"),
        (request(return_token_ids=True), "return_token_ids"),
        (request(continue_from={"token_ids": [1]}), "continue_from"),
        (request(continue_from=[1], stream=True), "continue_from"),
        (request(continue_from={}, stream=True), "continue_from.token_ids"),
        (request(model=5), "model"),
        ({"model": "m"}, "messages"),
        (request(messages=[]), "messages"),
        (request(messages="hi"), "messages"),
        (request(messages=[5]), "messages[0]"),
        (request(messages=[{"content": "x"}]), "messages[0].role"),
        (request(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
        (request(messages=[{"role": "user"}]), "messages[0].content"),
        (of(None), "messages[1].content"),
        (of(""), "messages[1].content"),
        (of([]), "messages[1].content"),
        (of(5), "messages[1].content"),
        (of([{"type": "video"}]), "messages[1].content[0]"),
        (of([{}]), "messages[1].content[0]"),
        (of(["text"]), "messages[1].content[0]"),
        (of([TEXT, {"type": "text"}]), "messages[1].content[1].text"),
        (of([TEXT, {"type": "image_url"}]), "messages[1].content[1].image_url"),
        (of([{"type": "image_url", "image_url": "x"}]), "messages[1].content[0].image_url"),
        (of([{"type": "image_url", "image_url": {}}]), "messages[1].content[0].image_url.url"),
        (
            of([{"type": "image_url", "image_url": {"url": ""}}]),
            "messages[1].content[0].image_url.url",
        ),
        (
            of([{"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}]),
            "messages[1].content[0].image_url.detail",
        ),
        (request(max_tokens=0), "max_tokens"),
        (request(max_tokens=-1), "max_tokens"),
        (request(max_tokens="many"), "max_tokens"),
        (request(max_tokens=1.5), "max_tokens"),
        (request(max_completion_tokens=0), "max_completion_tokens"),
        (request(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
        (request(temperature=-0.1), "temperature"),
        (request(temperature=2.1), "temperature"),
        (request(temperature="hot"), "temperature"),
        (request(top_p=0), "top_p"),
        (request(top_p=1.1), "top_p"),
        (request(seed="x"), "seed"),
        (request(seed=2**63), "seed"),
        (request(stop=["a"] * 5), "stop"),
        (request(stop=[""]), "stop"),
        (request(stop=""), "stop"),
        (request(stop=5), "stop"),
        (request(stream="maybe"), "stream"),
        (request(stream_options=5), "stream_options"),
    ],
)
def test_a_mistake_is_blamed_on_its_field(document: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_chat_request(document)
    assert caught.value.param == param
    assert param in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b"\xff\xfe", b"[" * 100_000, b'{"a": 1e}'])
def test_a_body_that_is_not_json_is_told_so(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="not valid JSON"):
        load_json(body)


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_told_so(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="must be a JSON object"):
        load_json(body)


def test_images_are_found_in_order_with_the_path_of_their_url() -> None:
    chat = parse_chat_request(
        request(
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [IMAGE, TEXT, IMAGE]},
                {"role": "assistant", "content": "a cat"},
                {"role": "user", "content": [IMAGE]},
            ]
        )
    )
    assert [path for path, _ in chat.images] == [
        "messages[1].content[0].image_url.url",
        "messages[1].content[2].image_url.url",
        "messages[3].content[0].image_url.url",
    ]


def test_fields_that_only_an_engine_knows_travel_on() -> None:
    chat = parse_chat_request(request(top_k=5, messages=[{"role": "user", "content": "x", "n": 1}]))
    sent = chat.model_dump(exclude_unset=True)
    assert sent["top_k"] == 5
    assert sent["messages"][0]["n"] == 1


def test_an_assistant_may_say_nothing() -> None:
    chat = parse_chat_request(of(None, role="assistant"))
    assert chat.messages[1].content is None


def test_both_names_of_the_token_limit_work() -> None:
    assert parse_chat_request(request(max_tokens=3)).max_new_tokens == 3
    assert parse_chat_request(request(max_completion_tokens=4)).max_new_tokens == 4
    both = request(max_tokens=3, max_completion_tokens=3)
    assert parse_chat_request(both).max_new_tokens == 3
    assert parse_chat_request(request()).max_new_tokens is None


def test_stop_is_one_string_or_several() -> None:
    assert parse_chat_request(request(stop="a")).stop_strings == ["a"]
    assert parse_chat_request(request(stop=["a", "b"])).stop_strings == ["a", "b"]
    assert parse_chat_request(request()).stop_strings == []


def test_a_workers_message_may_have_fields_of_a_newer_release() -> None:
    body = {"req_id": "r", "mm_items": ["u"], "num_parts": 1, "part_idx": 0, "new_field": 1}
    assert parse(EncodeRequest, json.dumps(body).encode()).req_id == "r"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (EncodeRequest, {"req_id": "r", "mm_items": [], "num_parts": 1, "part_idx": 0}, "mm_items"),
        (
            RoomSendRequest,
            {"generation": 1, "session_id": "s", "block_addresses": []},
            "block_addr",
        ),
        (WorkerReport, {**REPORT, "version": 2}, "version"),
        (WorkerReport, {**REPORT, "stage": "both"}, "stage"),
        (WorkerReport, {**REPORT, "worker_id": ""}, "worker_id"),
    ],
)
def test_a_peers_mistake_is_blamed_on_its_field(
    kind: Any, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(kind, body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_report_without_the_optional_parts_is_valid() -> None:
    assert parse(WorkerReport, dict(REPORT)).load.num_running_reqs == 0
