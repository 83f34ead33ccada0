"""What request bodies cost: bytes held at once, and time of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest

from epd.coordinator.body_budget import BodyBudget
from epd.coordinator.request_body import RequestBody
from epd.errors import OverloadedError, TooLargeError
from epd.types import RequestId, Room, Stage, WorkerState
from epd.wire import ModelCard, WorkerReport, dump_json, load_json
from tests.fakes.deployment import TOKEN, Deployment, chat_body, data_url, deployed, image_part
from tests.media.images import png

CHAT = "/v1/chat/completions"
KB = 1000
GAUGE = "epd_request_bytes_in_flight"
PREFILL = WorkerReport(
    worker_id="prefill-0",
    epoch=1,
    stage=Stage.PREFILL,
    engine="fake",
    state=WorkerState.READY,
    url="http://10.0.0.1:1",
    model=ModelCard(model_id="tiny", model_type="t", context_tokens=1),
)


def text_body(num_bytes: int) -> bytes:
    body = json.dumps(chat_body(padding="")).encode()
    return body.replace(b'"padding": "', b'"padding": "' + b"x" * (num_bytes - len(body)))


def small_budget() -> dict[str, int]:
    return {"max_body_bytes": 600 * KB, "max_in_flight_bytes": 1000 * KB}


async def test_bodies_over_the_budget_are_refused_until_others_have_gone() -> None:
    async with deployed(requests=small_budget()) as d:
        d.decode.faults.hold = release = asyncio.Event()
        running = asyncio.create_task(d.send(text_body(550 * KB)))
        await d.fleet.until(lambda: d.decode.received)
        refused = await d.send(text_body(550 * KB))
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert "no room for this one's body, of 1000000 bytes for all" in refused.error["message"]
        small = asyncio.create_task(d.chat())
        await d.fleet.until(lambda: len(d.decode.received) == 2)
        release.set()
        assert [(await task).status for task in (running, small)] == [200, 200]
        assert (await d.send(text_body(550 * KB))).status == 200


async def test_an_upload_for_which_there_is_no_room_is_refused_before_it_is_sent() -> None:
    async with deployed(requests=small_budget()) as d:
        d.decode.faults.hold = release = asyncio.Event()
        running = asyncio.create_task(d.send(text_body(550 * KB)))
        await d.fleet.until(lambda: d.decode.received)
        head = await first_line(d, b"Content-Length: 500000\r\n")
        assert head.split()[1] == b"503"
        head = await first_line(d, b"Content-Length: 700000\r\n")
        assert head.split()[1] == b"413"
        release.set()
        assert (await running).status == 200


async def first_line(d: Deployment, headers: bytes) -> bytes:
    """Of the answer to a request whose body never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(d.url.rpartition(":")[2]))
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.transport.abort()


async def test_bytes_without_an_announced_length_are_counted_as_they_come() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 50 * KB

    async with deployed(requests=small_budget()) as d:
        d.decode.faults.hold = release = asyncio.Event()
        running = asyncio.create_task(d.send(text_body(550 * KB)))
        await d.fleet.until(lambda: d.decode.received)
        assert (await d.request("POST", CHAT, pieces())).status == 503
        release.set()
        assert (await running).status == 200
        assert (await d.request("POST", CHAT, pieces())).status == 400, "it is read, and no JSON"


async def test_a_slow_upload_takes_no_more_of_the_budget_than_has_come() -> None:
    async with deployed(requests=small_budget()) as d:
        port = int(d.url.rpartition(":")[2])
        uploads = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in uploads:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            writer.write(b"Content-Length: 590000\r\n\r\n" + b" " * KB)
        while (await d.metrics())[GAUGE] < 5 * KB:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.005)
        assert (await d.send(text_body(550 * KB))).status == 200
        for _, writer in uploads:
            writer.transport.abort()


async def test_the_body_of_a_running_request_is_what_the_workers_got_and_not_its_base64() -> None:
    picture = png(1200, 1200)
    assert len(picture) > 3 * 2**20
    sent = json.dumps(chat_body(image_part(data_url(picture)))).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield sent  # which is here already, and stays

    async with deployed() as d:
        d.decode.faults.hold = release = asyncio.Event()
        with traced_memory() as num_bytes:
            running = asyncio.create_task(d.request("POST", CHAT, pieces()))
            await d.fleet.until(lambda: d.decode.received and d.encode.sent)
            assert (await d.metrics())[GAUGE] < 2 * KB
            assert num_bytes() < 1.2 * len(picture), "the cached picture, and no base64 beside it"
        release.set()
        assert (await running).status == 200


@contextlib.contextmanager
def traced_memory() -> Generator[Any]:
    """Gives the bytes that Python holds and has allocated within the block."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_shares_are_counted_and_given_back() -> None:
    budget = BodyBudget(max_body_bytes=6, max_bytes=10)
    with budget.share() as one, budget.share() as two:
        one.take(4)
        one.take(2)
        with pytest.raises(TooLargeError, match="more than the 6 bytes"):
            one.take(1)
        two.take(4)
        with pytest.raises(OverloadedError, match="of 10 bytes for all"):
            two.take(1)
        assert (one.num_bytes, two.num_bytes, budget.num_bytes) == (6, 4, 10)
        one.keep(1)
        two.take(2)
        two.keep(20)  # what was rewritten may have grown, and is there already
        assert budget.num_bytes == 21
    assert budget.num_bytes == 0


async def test_a_large_body_is_read_and_written_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, list[int]] = {"load": [], "dump": []}

    def load(body: bytes, **options: bool) -> dict[str, Any]:
        threads["load"].append(threading.get_ident())
        return load_json(body, **options)

    def dump(document: dict[str, Any], **options: bool) -> bytes:
        threads["dump"].append(threading.get_ident())
        return dump_json(document, **options)

    monkeypatch.setattr("epd.coordinator.request_body.load_json", load)
    monkeypatch.setattr("epd.coordinator.request_body.dump_json", dump)
    here = threading.get_ident()
    picture = data_url(png(400, 400))
    async with deployed() as d:
        for body, is_read_here, is_written_here in (
            (text_body(10 * KB), True, True),
            (text_body(1000 * KB), False, False),
            (json.dumps(chat_body(image_part(picture))).encode(), False, True),
        ):
            for calls in threads.values():
                calls.clear()
            assert (await d.send(body)).status == 200
            assert [thread == here for thread in threads["load"]] == [is_read_here]
            assert [thread == here for thread in threads["dump"]] == [is_written_here]


async def test_the_loop_has_many_turns_while_a_body_of_many_values_is_read_and_written() -> None:
    read_body = json.dumps(chat_body(values=[[0]] * 100_000)).encode()
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    counting = asyncio.create_task(count())
    try:
        body = await RequestBody.read(read_body)
        num_while_read, num_turns = num_turns, 0
        written = await body.for_workers([], lambda _: "")
    finally:
        counting.cancel()
    body_of_attempt = written.of_attempt(RequestId("r"), Room(1), PREFILL)
    assert json.loads(body_of_attempt)["values"] == [[0]] * 100_000
    # The decoder and the encoder in C would allow one or two.
    assert num_while_read >= 10
    assert num_turns >= 10


def test_a_patient_reader_and_writer_do_what_those_in_a_hurry_do() -> None:
    document = {
        "a": [1, -1.5, 1e300, 2**70, True, False, None, 'ü\ud800\n"\\', {}, [], [[{"b": [0]}]]],
        "": {"x y": "", "ü": {"z": [1, [2, [3]]]}},
    }
    text = dump_json(document)
    assert dump_json(document, is_patient=True) == text
    assert load_json(text, is_patient=True) == load_json(text) == document
    for wrong in (b'{"a": NaN}', b'{"a" 1}', b'{"a": [1, }', b"[]", b"\xff", b"[" * 10**5):
        refusals: list[str] = []
        for is_patient in (False, True):
            with pytest.raises(TooLargeError.__mro__[1], match="the request body") as caught:
                load_json(wrong, is_patient=is_patient)
            refusals.append(str(caught.value))
        assert refusals[0] == refusals[1] or "recursion" in refusals[0]


LIMIT = 2**18


@pytest.mark.parametrize("value", ["0", "[]", "{}", '"ab"', '"\\\\"', '"\\""', '[{"a":0}]'])
def test_a_body_of_so_many_values_that_it_would_swell_in_memory_is_refused(value: str) -> None:
    body = '{"x": [' + ",".join([value] * (LIMIT + 1)) + "]}"
    with pytest.raises(TooLargeError, match="more than the 262144 values allowed"):
        load_json(body.encode())


@pytest.mark.parametrize("text", ["{[,", '"[],', "\\[,", '\\"[', '\\\\"'])
def test_what_looks_like_values_within_a_long_text_is_text(text: str) -> None:
    document = {"x": [text * LIMIT], "y": ["[,{"] * 10}
    assert load_json(json.dumps(document).encode()) == document


async def test_what_workers_send_has_a_limit_of_its_own() -> None:
    span = {"request_id": "r", "name": "decode", "start_unix_s": 1, "duration_s": 1}
    async with deployed(requests={"max_body_bytes": 1024, "max_in_flight_bytes": 1024}) as d:
        await d.decode.register(spans=[span] * 1000)
        body = d.decode.report(labels={"x": "y" * 2**20}).model_dump_json().encode()
        path = f"/internal/workers/{d.decode.worker_id}"
        refused = await d.request("PUT", path, body, TOKEN.headers)
        assert (refused.status, refused.error["code"]) == (413, "request_too_large")
        slot = d.fleet.slots[0] + "/encode"
        items = {"req_id": "r_local_part_0", "num_parts": 1, "part_idx": 0, "mm_items": ["u" * KB]}
        unknown = await d.request("POST", slot, json.dumps({**items, "x": "y" * 10**5}).encode())
        assert (unknown.status, unknown.error["param"]) == (400, "req_id")
        large = await d.request("POST", slot, json.dumps({**items, "x": "y" * 2**20}).encode())
        assert (large.status, large.error["code"]) == (413, "request_too_large")
        assert (await d.send(text_body(1024))).status == 200
        assert (await d.send(text_body(1025))).status == 413
