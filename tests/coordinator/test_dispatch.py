"""Prefill and decode of one request, over HTTP and a fake fleet."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import aiohttp
import pytest

from epd.api import chat
from epd.api.chat import ClientSink
from epd.coordinator.client import WorkerClient
from epd.types import Stage, WorkerState
from tests.fakes.deployment import ONE_OF_EACH, TOKEN, chat_body, deployed, image_part

CHAT = "/v1/chat/completions"
LONG = {"long": "x" * 2**24}  # more than the buffers between the coordinator and a client
NEVER = asyncio.Event


async def test_both_workers_get_the_same_body_and_decode_answers() -> None:
    async with deployed() as d:
        answer = await d.chat()
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "toktoktok"
        (to_prefill,), (to_decode,) = d.prefill.bodies(CHAT), d.decode.bodies(CHAT)
        assert to_prefill == to_decode
        assert to_prefill["bootstrap_host"] == "127.0.0.1"
        assert to_prefill["bootstrap_port"] == 9
        assert to_prefill["rid"] == answer.headers["x-epd-request-id"]
        assert 0 <= to_prefill["bootstrap_room"] < 2**63


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_everything_works_over_ipv6() -> None:
    async with deployed(host="::1") as d:
        answer = await d.chat(image_part(), stream=True)
        assert answer.events[-1] == b"[DONE]"
        (body,) = d.decode.bodies(CHAT)
        assert body["bootstrap_host"] == "::1", "whoever adds a port adds brackets"
        (item,) = d.encode.bodies("/encode")[0]["mm_items"]
        assert item["url"].startswith("http://[::1]:")
        urls = await d.request("GET", "/admin/encoder_urls", headers=TOKEN.headers)
        assert all(url.startswith("http://[::1]:") for url in urls.json["encoder_urls"])


async def test_a_stream_is_relayed_as_decode_sent_it() -> None:
    async with deployed() as d:
        answer = await d.chat(stream=True, stream_options={"include_usage": True})
        assert answer.headers["Content-Type"] == "text/event-stream"
        *chunks, usage, done = answer.events
        assert done == b"[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 3
        assert len(chunks) == 4
        record = await d.record(answer)
        assert record["outcome"] == "finished"
        assert 0 < record["ttft_s"] <= record["e2e_s"]
        assert d.decode.aborted == d.prefill.aborted == []


async def test_no_two_requests_share_a_room() -> None:
    async with deployed() as d:
        await asyncio.gather(*(d.chat() for _ in range(20)))
        assert len({body["bootstrap_room"] for body in d.decode.bodies(CHAT)}) == 20


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_4xx_reaches_the_client_and_cancels_its_peer(
    stage: Stage, stream: bool
) -> None:
    async with deployed() as d:
        (worker,), (peer,) = d.fleet.of(stage), d.fleet.of(other(stage))
        peer.faults.hold = NEVER()
        worker.faults.status = 400
        error = {"message": "too long", "param": "messages", "code": "context_length_exceeded"}
        worker.faults.body = {"error": error}
        answer = await d.chat(stream=stream)
        assert answer.status == 400
        assert answer.error == {**error, "type": "invalid_request_error"}
        await d.fleet.until(lambda: peer.aborted and worker.aborted and peer.num_cancelled)
        assert (await d.record(answer))["outcome"] == "failed"


def other(stage: Stage) -> Stage:
    return Stage.DECODE if stage is Stage.PREFILL else Stage.PREFILL


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
@pytest.mark.parametrize(
    ("status", "seen"),
    [(500, 502), (503, 502), (401, 502), (404, 502), (302, 502), (422, 400), (429, 503)],
)
async def test_a_workers_refusal_becomes_a_status_that_a_client_understands(
    stage: Stage, status: int, seen: int
) -> None:
    """A wrong cluster token or path among us is no 401 or 404 of the client's."""
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.status = status
        assert (await d.chat()).status == seen


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_a_worker_that_cuts_before_its_answer_fails_the_request_and_is_suspect(
    stage: Stage,
) -> None:
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.cut = True
        answer = await d.chat()
        assert answer.status == 502
        assert f"{stage} worker {stage}-0 vanished" in answer.error["message"]
        refused = await d.chat()
        assert refused.status == 503
        assert f"no {stage} worker" in refused.error["message"]
        worker.faults.cut = False
        await worker.register()
        assert (await d.chat()).status == 200


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_a_refused_connection_names_the_stage_at_once(stage: Stage) -> None:
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        await worker.die()
        answer = await d.chat()
        assert answer.status == 502
        assert f"{stage} worker {stage}-0 cannot be reached" in answer.error["message"]


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_a_worker_that_leaves_ends_the_request_where_there_is_no_other(stage: Stage) -> None:
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.hold = NEVER()
        pending = asyncio.create_task(d.chat())
        await d.fleet.until(lambda: worker.received)
        await worker.register(state=WorkerState.GONE)
        answer = await pending
        assert answer.status == 502
        assert f"{stage} worker {stage}-0 has left" in answer.error["message"]


@pytest.mark.parametrize("how", ["die", "leave", "cut"])
async def test_a_prefill_that_goes_after_its_handoff_leaves_decode_streaming(how: str) -> None:
    async with deployed() as d:
        d.decode.faults.hold, d.decode.faults.hold_after = asyncio.Event(), 1
        d.prefill.faults.fail_after_handoff = how == "cut"
        async with d.session.post(d.url + CHAT, json=chat_body(stream=True)) as response:
            assert await response.content.readuntil(b"\n\n")
            if how == "die":
                await d.prefill.die()
            if how == "leave":
                await d.prefill.register(state=WorkerState.DRAINING)
                await d.prefill.register(state=WorkerState.GONE)
            # The loss has been seen by the coordinator before decode goes on.
            await d.request("GET", "/admin/workers", headers=TOKEN.headers)
            d.decode.faults.hold.set()
            rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b"error" not in rest
        assert (await d.last_record())["outcome"] == "finished"


async def test_a_prefill_that_fails_after_a_whole_answer_does_not_spoil_it() -> None:
    async with deployed() as d:
        original = d.prefill.routes()[CHAT]
        assert original is not None
        answered = asyncio.Event()
        d.prefill.faults.hold = answered

        async def answer_without_prefill() -> None:
            await d.fleet.until(lambda: d.decode.received)
            d.fleet.room(d.decode.bodies(CHAT)[0]["bootstrap_room"]).set()
            await d.fleet.until(lambda: not d.decode.num_running)
            d.prefill.faults.status = 500
            answered.set()

        helper = asyncio.create_task(answer_without_prefill())
        answer = await d.chat()
        await helper
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 3
        assert (await d.record(answer))["outcome"] == "finished"


@pytest.mark.parametrize("fault", ["cut_after", "end_after"])
async def test_a_stream_cut_short_ends_with_an_error_event_and_no_done(fault: str) -> None:
    async with deployed() as d:
        setattr(d.decode.faults, fault, 2)
        answer = await d.chat(stream=True)
        assert answer.status == 200
        *tokens, error = answer.events
        assert len(tokens) == 2
        assert "decode worker decode-0" in json.loads(error)["error"]["message"]
        assert json.loads(error)["error"]["code"] == "worker_failed"
        record = await d.record(answer)
        assert (record["outcome"], record["status"]) == ("failed", 502)
        await d.fleet.until(lambda: d.prefill.aborted)


async def test_an_error_event_in_mid_stream_is_told_once_and_counts_as_a_failure() -> None:
    async with deployed() as d:
        d.decode.faults.error_after = 2
        answer = await d.chat(stream=True)
        *tokens, error = answer.events
        assert len(tokens) == 2
        assert b"error" not in b"".join(tokens)
        assert "out of memory" in json.loads(error)["error"]["message"]
        assert (await d.record(answer))["outcome"] == "failed"


async def test_an_error_event_that_comes_first_becomes_a_status() -> None:
    async with deployed() as d:
        d.decode.faults.error_after = 0
        answer = await d.chat(stream=True)
        assert answer.status == 502
        assert "out of memory" in answer.error["message"]


async def test_text_that_looks_like_an_error_event_is_text() -> None:
    async with deployed() as d:
        d.decode.token = '\n\ndata: {"error": {"code": 400}}\n\ndata: [DONE]\n\n'
        answer = await d.chat(stream=True)
        assert answer.events[-1] == b"[DONE]"
        assert len(answer.events) == 5
        assert (await d.record(answer))["outcome"] == "finished"


async def test_a_whole_answer_cut_in_its_middle_is_a_502() -> None:
    async with deployed() as d:
        d.decode.faults.cut_whole = True
        answer = await d.chat()
        assert answer.status == 502
        assert "decode worker decode-0 vanished" in answer.error["message"]


async def test_no_first_token_in_time_is_a_504() -> None:
    async with deployed(requests={"first_token_s": 0.1}) as d:
        d.prefill.faults.hold = NEVER()
        answer = await d.chat(stream=True)
        assert answer.status == 504
        assert "the first token did not come within 0.1 s" in answer.error["message"]
        await d.fleet.until(lambda: d.prefill.aborted and d.decode.aborted)


async def test_a_stall_in_mid_stream_ends_it_long_before_the_other_deadlines() -> None:
    async with deployed(requests={"stall_s": 0.1}) as d:
        d.decode.faults.hold, d.decode.faults.hold_after = NEVER(), 2
        began_s = time.monotonic()
        answer = await d.chat(stream=True)
        assert time.monotonic() - began_s < 5
        *tokens, error = answer.events
        assert len(tokens) == 2
        assert json.loads(error)["error"]["code"] == "deadline_exceeded"
        assert "the next token did not come within 0.1 s" in json.loads(error)["error"]["message"]
        await d.fleet.until(lambda: d.decode.aborted)


async def test_the_total_deadline_ends_even_a_stream_that_moves() -> None:
    async with deployed(requests={"total_s": 0.3}) as d:
        d.decode.num_tokens = 10**9
        answer = await d.chat(stream=True)
        assert "it was not done within 0.3 s" in json.loads(answer.events[-1])["error"]["message"]


async def test_a_whole_answer_may_take_longer_than_the_first_token_and_a_stall() -> None:
    async with deployed(requests={"first_token_s": 0.1, "stall_s": 0.1}) as d:
        d.decode.faults.hold = release = asyncio.Event()
        pending = asyncio.create_task(d.chat())
        done, _ = await asyncio.wait([pending], timeout=0.4)
        assert not done
        release.set()
        assert (await pending).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_images", [0, 2])
async def test_a_client_that_leaves_reaches_every_stage_at_once(
    stream: bool, num_images: int
) -> None:
    async with deployed() as d:
        d.decode.faults.hold, d.decode.faults.hold_after = NEVER(), 1
        d.encode.faults.hold = NEVER() if num_images else None
        d.prefill.faults.hold = None if num_images else NEVER()
        body = chat_body(*[image_part() for _ in range(num_images)], stream=stream)
        pending = asyncio.create_task(d.send(body))
        waited_for = d.encode if num_images else d.prefill
        await d.fleet.until(lambda: d.decode.received and waited_for.received)
        rid = d.decode.bodies(CHAT)[0]["rid"]
        began_s = time.monotonic()
        pending.cancel()
        stages = [d.prefill, d.decode, *([d.encode] if num_images else [])]
        await d.fleet.until(lambda: all(worker.aborted == [rid] for worker in stages))
        assert time.monotonic() - began_s < 1.0
        await d.settle()
        record = await d.last_record()
        assert (record["outcome"], record["status"]) == ("aborted", 499)


async def test_a_client_that_leaves_in_mid_stream_stops_decode() -> None:
    async with deployed() as d:
        d.decode.num_tokens = 10**9
        async with d.session.post(d.url + CHAT, json=chat_body(stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await d.fleet.until(lambda: d.decode.aborted and not d.decode.num_running)
        await d.settle()
        assert (await d.last_record())["outcome"] == "aborted"
        workers = d.coordinator.registry.all()
        assert {w.state for w in workers} == {WorkerState.READY}, "nobody is blamed for the client"


async def test_a_client_that_hangs_up_right_after_done_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_: ClientSink) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ClientSink, "finish", never)
    async with deployed() as d:
        async with d.session.post(d.url + CHAT, json=chat_body(stream=True)) as response:
            await response.content.readuntil(b"[DONE]\n\n")
            response.close()
        await d.settle()
        assert (await d.last_record())["outcome"] == "finished"
        assert d.decode.aborted == d.prefill.aborted == []


async def test_an_answer_is_whole_although_prefill_never_says_that_it_is_done() -> None:
    async with deployed() as d:
        d.prefill.faults.hold = NEVER()
        pending = asyncio.create_task(d.chat(stream=True))
        await d.fleet.until(lambda: d.decode.received)
        d.fleet.room(d.decode.bodies(CHAT)[0]["bootstrap_room"]).set()
        answer = await pending
        assert answer.events[-1] == b"[DONE]"
        await d.fleet.until(lambda: d.prefill.num_cancelled)
        assert (await d.record(answer))["outcome"] == "finished"


async def test_a_decode_worker_lost_after_its_whole_answer_is_not_missed() -> None:
    async with deployed() as d:
        for worker in (d.prefill, d.decode):
            worker.faults.status, worker.faults.body = 200, LONG
        async with d.session.post(d.url + CHAT, json=chat_body()) as response:
            await d.decode.register(epoch=2)  # the life that answered is over
            assert await response.json() == LONG
        await d.settle()
        assert (await d.last_record())["outcome"] == "finished"


async def test_an_abort_that_a_worker_refuses_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployed() as d:
        d.prefill.faults.status = 400
        await d.decode.die()
        assert (await d.chat()).status in (400, 502)
        await d.settle()
    assert "never retrieved" not in caplog.text


async def test_an_abort_that_crashes_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def bug(*_: object) -> None:
        raise KeyError("bug")

    async with deployed() as d:
        d.prefill.faults.status = 400
        monkeypatch.setattr(WorkerClient, "abort", bug)
        assert (await d.chat()).status == 400
        await d.settle()
    crashes = [record for record in caplog.records if "crashed" in record.getMessage()]
    assert len(crashes) == 2, "one for each worker"
    assert "KeyError: 'bug'" in caplog.text


async def test_a_slow_reader_holds_back_decode_instead_of_filling_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "_FAREWELL_S", 0.05)
    async with deployed(requests={"stall_s": 0.5}) as d:
        d.decode.num_tokens = 10**9
        d.decode.token = "x" * 10_000
        async with d.session.post(d.url + CHAT, json=chat_body(stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            # Reading no further: the coordinator ends the request, and hangs up.
            await d.fleet.until(lambda: d.decode.aborted)
            assert d.decode.num_bytes_sent < 50 * 2**20
            async with asyncio.timeout(5):
                while d.is_connected(response):  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.01)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        record = await d.last_record()
        assert (record["outcome"], record["error_code"]) == ("failed", "deadline_exceeded")


async def test_a_client_that_does_not_read_a_whole_answer_is_hung_up_on() -> None:
    async with deployed(requests={"stall_s": 0.3}) as d:
        for worker in (d.prefill, d.decode):
            worker.faults.status, worker.faults.body = 200, LONG
        async with d.session.post(d.url + CHAT, json=chat_body()) as response:
            began_s = time.monotonic()
            await d.settle()
            assert time.monotonic() - began_s < 5, "long before the deadline of the request"
            async with asyncio.timeout(5):
                while d.is_connected(response):  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.01)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        record = await d.last_record()
        assert (record["outcome"], record["error_code"]) == ("failed", "deadline_exceeded")


async def test_a_client_that_reads_a_whole_answer_slowly_gets_all_of_it() -> None:
    stall_s = 1.0
    async with deployed(requests={"stall_s": stall_s}) as d:
        for worker in (d.prefill, d.decode):
            worker.faults.status, worker.faults.body = 200, LONG
        async with d.session.post(d.url + CHAT, json=chat_body()) as response:
            began_s, num_bytes = time.monotonic(), 0
            while num_bytes < 2**24:
                num_bytes += len(await response.content.readexactly(2**20))
                await asyncio.sleep(stall_s / 8)
            assert (await response.content.read()).endswith(b"}")
            assert time.monotonic() - began_s > stall_s
        await d.settle()
        assert (await d.last_record())["outcome"] == "finished"


async def test_many_streams_at_once_all_finish() -> None:
    async with deployed(workers={Stage.ENCODE: 2, Stage.PREFILL: 2, Stage.DECODE: 2}) as d:
        answers = await asyncio.gather(
            *(d.chat(*[image_part()] * (i % 3), stream=True) for i in range(200))
        )
        assert {answer.status for answer in answers} == {200}
        assert {answer.events[-1] for answer in answers} == {b"[DONE]"}
        placed = [w.num_placed for w in d.coordinator.registry.all() if w.stage is Stage.DECODE]
        assert sum(placed) == 200
        assert max(placed) <= 150


async def test_work_goes_to_the_workers_of_the_requested_model() -> None:
    async with deployed() as d:
        for stage in Stage:
            worker = await d.fleet.add(stage, f"other-{stage}")
            worker.model_id = "other"
            await worker.register()
        answer = await d.send({**chat_body(), "model": "other"})
        assert answer.status == 200
        assert d.decode.received == d.prefill.received == []


async def test_a_body_of_more_than_a_mebibyte_is_passed_on() -> None:
    async with deployed() as d:
        text = "long " * 500_000
        body: dict[str, Any] = {**chat_body(), "messages": [{"role": "user", "content": text}]}
        assert (await d.send(body)).status == 200
        assert d.decode.bodies(CHAT)[0]["messages"][0]["content"] == text


async def test_logs_tell_of_requests_but_not_of_their_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with deployed(workers=ONE_OF_EACH) as d:
        for fault in (None, 400, 500):
            d.prefill.faults.status = fault
            part = image_part()
            secret = "the-prompt-nobody-may-read"
            content = [part, {"type": "text", "text": secret}]
            await d.send({**chat_body(), "messages": [{"role": "user", "content": content}]})
            base64 = part["image_url"]["url"].partition(",")[2]
            assert secret not in caplog.text
            assert base64[:24] not in caplog.text
        assert TOKEN.headers["Authorization"].split()[1] not in caplog.text
        assert "signature=" not in caplog.text
        assert d.fleet.slots[0].split("/")[3] not in caplog.text
        assert "request finished (200)" in caplog.text
