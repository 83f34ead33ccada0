"""Each bad input is an error in OpenAI's shape that names the field at fault."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epd.types import Stage
from tests.fakes.deployment import (
    ONE_OF_EACH,
    TOKEN,
    Answer,
    Deployment,
    chat_body,
    data_url,
    deployed,
    image_part,
)
from tests.fakes.fleet import MODEL
from tests.media.images import jpeg, png

URL_FIELD = "messages[0].content[0].image_url.url"


@pytest.fixture
async def d() -> AsyncIterator[Deployment]:
    async with deployed(requests={"max_body_bytes": 4_000_000}) as deployment:
        yield deployment
        assert deployment.prefill.received == [], "nothing wrong reaches a worker"


def assert_error(answer: Answer, status: int, param: str | None, *words: str) -> None:
    assert answer.status == status, answer.body
    assert answer.headers["Content-Type"].startswith("application/json")
    assert set(answer.json) == {"error"}
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["param"] == param, answer.error
    for word in words:
        assert word in answer.error["message"], answer.error


def deep(levels: int) -> bytes:
    text = json.dumps(chat_body())
    return (text[:-1] + ', "x": ' + "[" * levels + "]" * levels + "}").encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"nope", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (json.dumps(chat_body(x=float("nan"))).encode(), "NaN"),
        (json.dumps(chat_body(temperature=float("inf"))).encode(), "Infinity"),
        (json.dumps(chat_body()).replace('"hi"', '"hi", "x": 1e999').encode(), "out of range"),
        (json.dumps(chat_body()).replace('"hi"', '"hi", "x": ' + "9" * 5000).encode(), "JSON"),
        (deep(100_000), "JSON"),
    ],
)
async def test_what_is_no_json_object_is_refused(d: Deployment, body: bytes, words: str) -> None:
    assert_error(await d.send(body), 400, None, words)


@pytest.mark.parametrize("levels", [*range(100, 1000, 50), *range(900, 1000, 5)])
async def test_deep_json_is_passed_on_or_refused_but_never_a_crash(levels: int) -> None:
    async with deployed() as d:
        answer = await d.send(deep(levels))
        assert answer.status in (200, 400), answer.body


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user(None), "messages[0].content"),
        (user(""), "messages[0].content"),
        (user([]), "messages[0].content"),
        (user(5), "messages[0].content"),
        (user([{"type": "smell"}]), "messages[0].content[0]"),
        (user([{"text": "x"}]), "messages[0].content[0]"),
        (user(["x"]), "messages[0].content[0]"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (user([{"type": "image_url", "image_url": {}}]), URL_FIELD),
        (user([{"type": "image_url", "image_url": {"url": ""}}]), URL_FIELD),
        (user("\ud800"), "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**80}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "\ud800"}, "model"),
    ],
)
async def test_a_wrong_field_is_named(d: Deployment, fields: dict[str, Any], param: str) -> None:
    answer = await d.send({**chat_body(), **fields})
    assert_error(answer, 400, param)
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("missing", ["messages", "model"])
async def test_a_missing_field_is_named(d: Deployment, missing: str) -> None:
    body = chat_body()
    del body[missing]
    assert_error(await d.send(body), 400, missing)


async def test_surrogates_in_names_of_fields_do_no_harm(d: Deployment) -> None:
    answer = await d.send({**chat_body(), "\ud800": 1, "max_tokens": 0})
    assert_error(answer, 400, None, "unicode")


PNG = png(64, 64)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,@@@@", "base64 is broken"),
        ("data:image/png;base64," + base64.b64encode(PNG).decode()[:-3], "cut off"),
        ("data:image/png;base64,", "image"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64," + base64.b64encode(b"no image at all").decode(), "image"),
        (data_url(jpeg(200, 200)[:200]), "image"),
        (data_url(PNG[:40]), "image"),
        ("http://127.0.0.1:1/x.png", "not public"),
        ("http://localhost:1/x.png", "not public"),
        ("http://[::1]/x.png", "not public"),
        ("http://169.254.169.254/latest/meta-data", "not public"),
        ("file:///etc/passwd", "must start with"),
        ("ftp://example.com/x.png", "must start with"),
        ("x.png", "must start with"),
        ("http://", "host"),
        ("http://user:secret@example.com/x.png", "user name"),
    ],
)
async def test_an_image_that_cannot_be_used_is_named(d: Deployment, url: str, words: str) -> None:
    answer = await d.chat(image_part(url))
    assert_error(answer, 400, URL_FIELD, words)
    assert answer.error["code"] == "invalid_image"
    assert "secret" not in answer.error["message"]


async def test_an_unreachable_image_is_named() -> None:
    async with deployed(media={"allow_private_addresses": True}) as d:
        answer = await d.chat(image_part(), image_part("http://127.0.0.1:1/x.png"))
        assert_error(answer, 400, "messages[0].content[1].image_url.url", "could not be fetched")


async def test_more_images_than_allowed_are_refused() -> None:
    async with deployed(media={"max_images_per_request": 2}) as d:
        answer = await d.chat(*[image_part()] * 3)
        assert_error(answer, 400, "messages[0].content[2].image_url.url", "more than the 2 allowed")


async def test_an_unknown_model_is_a_404(d: Deployment) -> None:
    answer = await d.send({**chat_body(), "model": "gpt-9"})
    assert_error(answer, 404, "model", "'gpt-9' is not served here", MODEL)
    assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(d: Deployment, chunked: bool) -> None:
    body = json.dumps(chat_body(padding="x" * 5_000_000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    if chunked:
        answer = await d.request("POST", "/v1/chat/completions", pieces())
    else:
        answer = await d.send(body)
    assert_error(answer, 413, None, "4000000")


async def test_a_compressed_body_is_read_and_counted_unpacked(d: Deployment) -> None:
    headers = {"Content-Encoding": "gzip", "Connection": "close"}
    small = gzip.compress(json.dumps({**chat_body(), "max_tokens": 0}).encode())
    assert_error(await d.send(small, headers), 400, "max_tokens")
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) < 200_000
    assert (await d.send(bomb, headers)).status == 413
    assert_error(await d.send(b"not gzip", headers), 400, None, "cannot be read")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/nope", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
    ],
)
async def test_an_unknown_path_or_method_is_said_so(
    d: Deployment, method: str, path: str, status: int
) -> None:
    answer = await d.request(method, path)
    assert_error(answer, status, None, method, path)
    if status == 405:
        assert answer.headers["Allow"]


async def test_head_is_answered_like_get_without_a_body(d: Deployment) -> None:
    answer = await d.request("HEAD", "/health")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("state", ["absent", "draining", "suspect"])
async def test_a_stage_without_a_worker_is_a_503_that_names_it(stage: Stage, state: str) -> None:
    workers = {**ONE_OF_EACH, stage: 0 if state == "absent" else 1}
    async with deployed(workers=workers) as d:
        if state == "draining":
            await d.fleet.of(stage)[0].register(state="draining")
        if state == "suspect":
            for worker in d.coordinator.registry.all():
                if worker.stage is stage:
                    d.coordinator.registry.suspect(worker)
        for stream in (False, True):
            answer = await d.chat(image_part(), stream=stream)
            assert_error(answer, 503, None, f"no {stage} worker")
            assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error["code"] == "no_worker"
        text = await d.chat()
        assert text.status == (200 if stage is Stage.ENCODE else 503)
        ready = await d.request("GET", "/ready")
        assert_error(ready, 503, None, stage)


async def test_without_any_worker_nothing_is_said_about_models() -> None:
    async with deployed(workers={}) as d:
        answer = await d.chat()
        assert_error(answer, 503, None, "encode, prefill or decode")
        assert "Retry-After" in answer.headers


async def test_requests_sent_on_one_connection_without_waiting_are_answered_in_order() -> None:
    async with deployed() as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(d.url.rpartition(":")[2]))
        for body in (b"nope", json.dumps(chat_body()).encode(), b"[]"):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        statuses = re.findall(r"HTTP/1\.1 (\d+)", text)
        assert statuses == ["400", "200", "400", "200"]


async def test_a_bug_is_a_500_that_tells_the_client_nothing(
    d: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("inner detail")

    monkeypatch.setattr(d.coordinator.registry, "model", bug)
    answer = await d.chat()
    assert_error(answer, 500, None, "internal error")
    assert "inner detail" not in answer.body.decode()
    assert answer.headers["x-epd-request-id"]


async def test_reports_of_workers_are_checked(d: Deployment) -> None:
    report = d.decode.report().model_dump(mode="json")

    async def put(worker_id: str = "decode-0", **fields: Any) -> Answer:
        body = json.dumps({**report, **fields}).encode()
        return await d.request("PUT", f"/internal/workers/{worker_id}", body, TOKEN.headers)

    assert (await put()).status == 200
    assert_error(await put("another"), 400, "worker_id")
    assert_error(await put(stage="smell"), 400, "stage")
    assert_error(await put(version=2), 400, "version")
    assert_error(await put(epoch=0), 400, "epoch")
    assert_error(await put(url="nonsense"), 400, "url")
    assert_error(await put(url="http://host/\r\nx"), 400, "url")
    assert_error(await put(url="http://::1:8000"), 400, "url", "http://[fd00::1]:8000")


async def test_a_body_that_stops_coming_gives_its_place_up(
    d: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.api.chat._SILENCE_S", 0.2)

    async def slow(pauses_s: list[float]) -> AsyncIterator[bytes]:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            yield b" "

    answer = await d.request("POST", "/v1/chat/completions", slow([0.0, 2.0]))
    assert_error(answer, 400, None, "nothing of it for 0.2 s")
    steady = await d.request("POST", "/v1/chat/completions", slow([0.05] * 10))
    assert_error(steady, 400, None, "JSON")  # it was read to its end


async def test_null_for_stream_is_no_stream() -> None:
    async with deployed() as d:
        answer = await d.chat(stream=None)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
        assert "stream" not in d.decode.bodies("/v1/chat/completions")[0]
