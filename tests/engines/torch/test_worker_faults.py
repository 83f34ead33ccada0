"""Whatever goes wrong, the client is told at once, and nothing stays held."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epd.engines.torch.engine import DecodeBatch, PrefillModel
from epd.engines.torch.prompt import PromptTokenizer
from epd.engines.torch.tiny import write_random_checkpoint
from epd.transfer import Fault, FaultKind
from epd.types import Stage
from tests.engines.torch.cluster import Answer, Cluster, running_cluster
from tests.reference import CASES, Case, picture, user

TEXT, IMAGE = CASES["text only"], CASES["one image"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen2_5_vl", seed=1)
    return path


@pytest.fixture
async def cluster(model: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, tmp_path) as cluster:
        yield cluster


class Gate:
    """Holds a method of the engine, in the compute thread, until the test opens it."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, 5)

    def pass_through(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(5)


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, owner: type, after: int = 0) -> Iterator[Gate]:
    """Hold the `step` of `owner` from its call number `after` on."""
    gate, step, num_calls = Gate(), owner.step, 0

    def held_step(self: Any, *args: Any) -> Any:
        nonlocal num_calls
        if num_calls >= after:
            gate.pass_through()
        num_calls += 1
        return step(self, *args)

    monkeypatch.setattr(owner, "step", held_step)
    try:
        yield gate
    finally:
        gate.is_open.set()


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.body["error"]["code"]


async def both(cluster: Cluster, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """What prefill and decode answer to the same request; a failure is followed by aborts."""
    async with asyncio.timeout(5):
        prefill, decode = await asyncio.gather(
            cluster.post(Stage.PREFILL, body), cluster.post(Stage.DECODE, body)
        )
    if (prefill.status, decode.status) != (200, 200):
        await cluster.abort(body["rid"])  # as the coordinator does
    return prefill, decode


async def serves_again(cluster: Cluster) -> None:
    await cluster.wait_at_rest()
    answer = await cluster.chat(cluster.body(IMAGE, "afterwards"))
    assert answer.status == 200
    await cluster.wait_at_rest()


async def test_abort_while_waiting_for_embeddings(cluster: Cluster):
    reached, never = asyncio.Event(), asyncio.Event()

    async def hold(call: str, body: dict[str, Any]) -> None:
        reached.set()
        await never.wait()

    cluster.coordinator.intercept = hold
    pair = asyncio.create_task(both(cluster, cluster.body(IMAGE, "r1")))
    await reached.wait()
    await cluster.abort("r1")
    assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
    cluster.coordinator.intercept = None
    await serves_again(cluster)


async def test_abort_while_the_image_is_being_encoded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    from epd.engines.torch.vision import VisionEncoder

    run, gate = VisionEncoder.run, Gate()

    def held_run(self: Any, batch: Any) -> Any:
        gate.pass_through()
        return run(self, batch)

    monkeypatch.setattr(VisionEncoder, "run", held_run)
    pair = asyncio.create_task(both(cluster, cluster.body(IMAGE, "r1")))
    await gate.reached()
    await cluster.abort("r1")
    assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
    gate.is_open.set()
    await serves_again(cluster)


async def test_abort_between_encode_and_hand_off(cluster: Cluster):
    reached, never = asyncio.Event(), asyncio.Event()

    async def hold_send(call: str, body: dict[str, Any]) -> None:
        if call == "send":
            reached.set()
            await never.wait()

    cluster.coordinator.intercept = hold_send
    pair = asyncio.create_task(both(cluster, cluster.body(IMAGE, "r1")))
    await reached.wait()
    assert (await cluster.metrics(Stage.ENCODE))['epd_arena_pinned_bytes{arena="embedding"}'] > 0
    await cluster.abort("r1")
    assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
    cluster.coordinator.intercept = None
    await serves_again(cluster)


async def test_abort_while_waiting_for_kv_room(model: Path, tmp_path: Path):
    async with running_cluster(model, tmp_path, kv_bytes=2**20) as cluster:
        long = Case([user("word " * 400)], [])
        first = asyncio.create_task(cluster.post(Stage.PREFILL, cluster.body(long, "first")))
        await cluster.coordinator.wait_for_span("first", "prefill")
        pair = asyncio.create_task(both(cluster, cluster.body(long, "second")))
        await cluster.wait_for(Stage.PREFILL, "epd_rooms_open", 2)
        await cluster.abort("second")
        assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
        assert not first.done()
        await cluster.abort("first")
        assert code_of(await first) == (499, "aborted")
        await serves_again(cluster)


async def test_abort_while_prefilling_keeps_the_blocks_until_the_chunk_is_done(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    with gated(monkeypatch, PrefillModel) as gate:
        pair = asyncio.create_task(both(cluster, cluster.body(TEXT, "r1")))
        await gate.reached()
        await cluster.abort("r1")
        assert (await cluster.metrics(Stage.PREFILL))["epd_kv_blocks_used"] > 0
        gate.is_open.set()
        assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
    await serves_again(cluster)


async def test_abort_while_the_room_is_open(cluster: Cluster):
    body = cluster.body(IMAGE, "r1")
    prefill = asyncio.create_task(cluster.post(Stage.PREFILL, body))
    await cluster.coordinator.wait_for_span("r1", "prefill")
    assert (await cluster.metrics(Stage.PREFILL))["epd_rooms_open"] == 1
    await cluster.abort("r1", Stage.PREFILL)
    assert code_of(await prefill) == (499, "aborted")
    # A decode worker that comes too late is told why.
    assert code_of(await cluster.post(Stage.DECODE, body)) == (499, "aborted")
    await serves_again(cluster)


async def test_abort_during_the_kv_hand_off(cluster: Cluster):
    cluster.network.inject(Fault(FaultKind.HANG))
    pair = asyncio.create_task(both(cluster, cluster.body(TEXT, "r1")))
    await cluster.wait_for(Stage.DECODE, "epd_kv_blocks_used")
    await cluster.abort("r1")
    assert {code_of(answer) for answer in await pair} == {(499, "aborted")}
    # The library still reads the source: its blocks are held until it has settled.
    assert (await cluster.metrics(Stage.PREFILL))["epd_kv_blocks_used"] > 0
    cluster.network.thaw()
    await serves_again(cluster)


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_while_decoding(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    with gated(monkeypatch, DecodeBatch, after=2) as gate:
        body = cluster.body(IMAGE, "r1", stream=stream, max_tokens=64)
        pair = asyncio.create_task(both(cluster, body))
        await gate.reached()
        await cluster.abort("r1", Stage.DECODE)
        _, decode = await pair
        if stream:
            assert decode.status == 200
            assert decode.chunks[-1]["error"]["code"] == "aborted"
            assert "[DONE]" not in decode.chunks
        else:
            assert code_of(decode) == (499, "aborted")
    await serves_again(cluster)


async def test_a_client_that_leaves_its_stream_frees_everything(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    with gated(monkeypatch, DecodeBatch, after=2) as gate:
        body = cluster.body(TEXT, "r1", stream=True, max_tokens=64)
        prefill = asyncio.create_task(cluster.post(Stage.PREFILL, body))
        url = cluster.url(Stage.DECODE) + "/v1/chat/completions"
        response = await cluster.session.post(url, json=body, headers=cluster.headers)
        assert (await response.content.readline()).startswith(b"data: ")
        await gate.reached()
        response.close()
        gate.is_open.set()
        assert (await prefill).status == 200
    await serves_again(cluster)
    assert (await cluster.metrics(Stage.DECODE))[
        'epd_worker_requests_total{outcome="aborted"}'
    ] == 1


async def test_an_encode_failure_reaches_both_answers_at_once(cluster: Cluster):
    async def fail(call: str, body: dict[str, Any]) -> web.Response | None:
        if call != "encode":
            return None
        error = {"message": "no encode worker", "type": "server_error", "code": "no_worker"}
        return web.json_response({"error": error}, status=503)

    cluster.coordinator.intercept = fail
    for answer in await both(cluster, cluster.body(IMAGE, "r1")):
        assert code_of(answer) == (503, "no_worker")
    cluster.coordinator.intercept = None
    await serves_again(cluster)


async def test_a_bad_image_is_a_400_that_names_its_field(cluster: Cluster):
    case = Case([user("a", None, "b", None)], [picture(30, 30, 1), picture(30, 30, 2)])
    body = cluster.body(case, "r1")
    part = body["messages"][0]["content"][3]["image_url"]
    part.update(cluster.coordinator.add_media(b"this is no image"))
    for answer in await both(cluster, body):
        assert code_of(answer) == (400, "invalid_image")
        assert answer.body["error"]["param"] == "messages[0].content[3].image_url.url"
    await serves_again(cluster)


async def test_bytes_that_are_not_those_of_the_hash_are_refused(cluster: Cluster):
    body = cluster.body(IMAGE, "r1")
    url = body["messages"][0]["content"][0]["image_url"]
    cluster.coordinator.media[url["content_hash"]] = b"other bytes"
    for answer in await both(cluster, body):
        assert answer.status == 502
    await cluster.wait_at_rest()


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LAND_LATE])
@pytest.mark.parametrize("case", [TEXT, IMAGE], ids=["kv", "embeddings"])
async def test_a_failed_hand_off_is_told_quickly_and_its_destination_rests(
    cluster: Cluster, kind: FaultKind, case: Case
):
    cluster.network.inject(Fault(kind, seconds=0.05))
    for answer in await both(cluster, cluster.body(case, "r1")):
        assert code_of(answer) == (502, "transfer_failed")
    await serves_again(cluster)


async def test_a_room_that_nobody_takes_is_freed_at_the_end_of_its_lease(
    model: Path, tmp_path: Path
):
    async with running_cluster(model, tmp_path, request_timeout_s=1.0) as cluster:
        body = cluster.body(TEXT, "r1")
        assert code_of(await cluster.post(Stage.PREFILL, body)) == (504, "deadline_exceeded")
        assert code_of(await cluster.post(Stage.DECODE, body)) == (504, "deadline_exceeded")
        await cluster.wait_at_rest()


async def test_decode_does_not_wait_for_ever_for_a_room_that_never_opens(
    model: Path, tmp_path: Path
):
    async with running_cluster(model, tmp_path, request_timeout_s=0.2) as cluster:
        lonely = cluster.body(TEXT, "r2")
        assert code_of(await cluster.post(Stage.DECODE, lonely)) == (504, "deadline_exceeded")
        await cluster.wait_at_rest()


async def test_a_part_that_nobody_sends_for_is_unpinned_at_the_end_of_its_lease(
    model: Path, tmp_path: Path
):
    async with running_cluster(model, tmp_path, request_timeout_s=1.0) as cluster:
        body = cluster.body(IMAGE, "r1")
        item = body["messages"][0]["content"][0]["image_url"]
        part = {"req_id": "r1_local_part_0", "mm_items": [item], "num_parts": 1, "part_idx": 0}
        url = cluster.url(Stage.ENCODE)
        async with cluster.session.post(
            f"{url}/encode", json=part, headers=cluster.headers
        ) as response:
            assert response.status == 200
        pinned = 'epd_arena_pinned_bytes{arena="embedding"}'
        assert (await cluster.metrics(Stage.ENCODE))[pinned] > 0
        await cluster.wait_at_rest()
        send = {"req_id": "r1_local_part_0", "session_id": "x", "buffer_address": 1}
        async with cluster.session.post(
            f"{url}/send", json=send, headers=cluster.headers
        ) as response:
            assert response.status == 502


async def test_a_conversation_too_long_for_the_context_is_refused_by_name(
    model: Path, tmp_path: Path
):
    async with running_cluster(model, tmp_path, context_tokens=64) as cluster:
        long = cluster.body(Case([user("word " * 100)], []), "r1")
        image = cluster.body(Case([user(None)], [picture(300, 300, 1)]), "r2")
        greedy = cluster.body(TEXT, "r3", max_tokens=60)
        newer = cluster.body(TEXT, "r4", max_completion_tokens=60)
        del newer["max_tokens"]
        for body, param in (
            (long, "messages"),
            (image, "messages"),
            (greedy, "max_tokens"),
            (newer, "max_completion_tokens"),
        ):
            for answer in await both(cluster, body):
                assert code_of(answer) == (400, "context_length_exceeded")
                assert answer.body["error"]["param"] == param
        await cluster.wait_at_rest()


async def test_a_text_far_too_long_for_the_context_is_refused_before_it_is_tokenized(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def tokenize(*_: object) -> None:
        raise AssertionError("tokens take minutes and gigabytes for the largest of bodies")

    monkeypatch.setattr(PromptTokenizer, "tokenize", tokenize)
    async with running_cluster(model, tmp_path, context_tokens=64) as cluster:
        longer = cluster.body(Case([user("word " * 10_000)], []), "r1", max_tokens=3)
        for answer in await both(cluster, longer):
            assert code_of(answer) == (400, "context_length_exceeded")
            assert answer.body["error"]["param"] == "messages"
        await cluster.wait_at_rest()


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"frequency_penalty": 0.5},
    ],
)
async def test_what_the_engine_cannot_do_is_refused_by_name(
    cluster: Cluster, field: dict[str, Any]
):
    for answer in await both(cluster, cluster.body(TEXT, "r1", **field)):
        assert code_of(answer) == (400, "invalid_request")
        assert answer.body["error"]["param"] == next(iter(field))


async def test_defaults_that_clients_spell_out_are_accepted(cluster: Cluster):
    neutral = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "user": "somebody",
    }
    assert (await cluster.chat(cluster.body(TEXT, "r1", **neutral))).status == 200


async def test_the_detail_of_an_image_changes_nothing_and_a_wrong_one_is_named(cluster: Cluster):
    answers: list[Answer] = []
    for number, detail in enumerate((None, "auto", "low", "high")):
        body = cluster.body(IMAGE, f"r{number}")
        body["messages"][0]["content"][0]["image_url"]["detail"] = detail
        answers.append(await cluster.chat(body))
    assert {(answer.status, answer.text) for answer in answers} == {(200, answers[0].text)}
    body = cluster.body(IMAGE, "wrong")
    body["messages"][0]["content"][0]["image_url"]["detail"] = "medium"
    for answer in await both(cluster, body):
        assert code_of(answer) == (400, "invalid_request")
        assert answer.body["error"]["param"] == "messages[0].content[0].image_url.detail"


async def test_a_room_is_never_used_twice(cluster: Cluster):
    body = cluster.body(TEXT, "r1")
    assert (await cluster.chat(body)).status == 200
    again = await cluster.post(Stage.PREFILL, {**body, "rid": "r2"})
    assert code_of(again) == (400, "invalid_request")
    assert again.body["error"]["param"] == "bootstrap_room"
    await cluster.wait_at_rest()


async def test_the_kv_of_another_generation_is_not_given(cluster: Cluster):
    body = cluster.body(TEXT, "r1")
    prefill = asyncio.create_task(cluster.post(Stage.PREFILL, body))
    await cluster.coordinator.wait_for_span("r1", "prefill")
    room = f"{cluster.url(Stage.PREFILL)}/bootstrap/rooms/{body['bootstrap_room']}/send"
    send = {"generation": 999, "session_id": "decode", "block_addresses": [1]}
    async with cluster.session.post(room, json=send, headers=cluster.headers) as response:
        assert response.status == 502
    assert (await cluster.post(Stage.DECODE, body)).status == 200
    assert (await prefill).status == 200


async def test_a_failing_step_fails_its_requests_and_no_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    def explode(self: Any, slots: Any) -> Any:
        raise RuntimeError("out of memory, say")

    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "step", explode)
        _, decode = await both(cluster, cluster.body(TEXT, "r1"))
        assert code_of(decode) == (502, "worker_failed")
        assert "out of memory" not in decode.body["error"]["message"]
    await serves_again(cluster)


async def test_a_draining_worker_finishes_its_stream_and_refuses_new_work(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    worker = cluster.workers[Stage.DECODE]
    with gated(monkeypatch, DecodeBatch, after=2) as gate:
        running = asyncio.create_task(cluster.chat(cluster.body(IMAGE, "old", stream=True)))
        await gate.reached()
        worker.lifecycle.stop()
        async with asyncio.timeout(5), cluster.coordinator.changed:
            await cluster.coordinator.changed.wait_for(
                lambda: any(report.state == "draining" for report in cluster.coordinator.reports)
            )
        refused = await cluster.post(Stage.DECODE, cluster.body(TEXT, "new"))
        assert code_of(refused) == (503, "overloaded")
        assert not worker.task.done()
        gate.is_open.set()
        assert (await running).chunks[-1] == "[DONE]"
        async with asyncio.timeout(5):
            await worker.task
    reports = [r for r in cluster.coordinator.reports if r.stage is Stage.DECODE]
    assert reports[-1].state == "gone"


async def test_workers_refuse_a_wrong_token(cluster: Cluster):
    cluster.headers = {"Authorization": "Bearer somebody-elses-token"}
    for stage in (Stage.PREFILL, Stage.DECODE):
        answer = await cluster.post(stage, cluster.body(TEXT, "r1"))
        assert code_of(answer) == (401, "invalid_api_key")
