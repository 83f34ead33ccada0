"""Three workers answer over HTTP as one: same tokens as transformers, exact bytes, exact shapes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engines.torch.checkpoint import Checkpoint
from epd.engines.torch.tiny import write_random_checkpoint
from epd.types import Stage
from tests.engines.torch.cluster import Cluster, running_cluster
from tests.reference import CASES, Reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen2_5_vl", seed=1)
    return path


class Expected:
    """What transformers answers, up to the end of the sequence, where a worker stops."""

    def __init__(self, model: Path) -> None:
        self._reference = Reference(model)
        self._eos_token_ids = Checkpoint(model).eos_token_ids

    def text(self, name: str, num_tokens: int) -> str:
        token_ids = self._reference.generate(CASES[name], num_tokens)
        ends = [i for i, token_id in enumerate(token_ids) if token_id in self._eos_token_ids]
        token_ids = token_ids[: ends[0]] if ends else token_ids
        return self._reference.tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return Expected(model)


@pytest.fixture
async def cluster(model: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, tmp_path) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["text only", "one image", "two adjacent images"])
@pytest.mark.parametrize("stream", [False, True])
async def test_greedy_answers_equal_those_of_transformers(
    cluster: Cluster, expected: Expected, name: str, stream: bool
):
    answer = await cluster.chat(cluster.body(CASES[name], "r1", max_tokens=16, stream=stream))
    assert answer.status == 200
    assert answer.text == expected.text(name, 16)
    await cluster.wait_at_rest()


async def test_eight_conversations_at_once_are_each_answered_as_alone(
    cluster: Cluster, expected: Expected
):
    bodies = [cluster.body(case, f"r{i}") for i, case in enumerate(CASES.values())]
    answers = await asyncio.gather(*(cluster.chat(body) for body in bodies))
    assert [a.text for a in answers] == [expected.text(name, 8) for name in CASES]
    await cluster.wait_at_rest()


async def test_a_whole_answer_has_openais_shape(cluster: Cluster):
    answer = await cluster.chat(cluster.body(CASES["text only"], "abc", max_tokens=5))
    body = answer.body
    assert body["id"] == "chatcmpl-abc"
    assert body["object"] == "chat.completion"
    assert body["model"] == cluster.workers[Stage.DECODE].identity.model.model_id
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["role"] == "assistant"
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


async def test_a_stream_has_openais_shape(cluster: Cluster):
    options = {"include_usage": True}
    body = cluster.body(
        CASES["text only"], "abc", stream=True, stream_options=options, max_tokens=5
    )
    chunks = (await cluster.chat(body)).chunks
    assert chunks[-1] == "[DONE]"
    usage, finish, first = chunks[-2], chunks[-3], chunks[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert {chunk["id"] for chunk in chunks[:-1]} == {"chatcmpl-abc"}
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    without = await cluster.chat(cluster.body(CASES["text only"], "d", stream=True))
    assert all("usage" not in chunk for chunk in without.chunks[:-1])


async def test_a_stop_string_ends_the_answer_before_it(cluster: Cluster):
    whole = (await cluster.chat(cluster.body(CASES["text only"], "a", max_tokens=16))).text
    stop = whole[5:7]
    answer = await cluster.chat(cluster.body(CASES["text only"], "b", max_tokens=16, stop=stop))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    await cluster.wait_at_rest()


async def test_prefill_and_decode_describe_their_kv_alike(cluster: Cluster):
    known: list[Any] = []
    for stage in (Stage.PREFILL, Stage.DECODE):
        url = cluster.url(stage) + "/server_info"
        async with cluster.session.get(url, headers=cluster.headers) as response:
            info = await response.json()
        assert info["stage"] == stage
        known.append([info[k] for k in ("kv_layout", "max_total_num_tokens", "num_parameters")])
    assert known[0] == known[1]
    assert known[0][0]["block_tokens"] == 16


async def test_a_seed_repeats_a_sampled_answer(cluster: Cluster):
    texts = [
        (await cluster.chat(cluster.body(CASES["one image"], rid, temperature=1, seed=7))).text
        for rid in "ab"
    ]
    assert texts[0] == texts[1]


async def test_exactly_the_expected_bytes_move_between_workers(cluster: Cluster, model: Path):
    body = cluster.body(CASES["two adjacent images"], "r1")
    answer = await cluster.chat(body)
    num_prompt_tokens = answer.body["usage"]["prompt_tokens"]
    language = Checkpoint(model).language
    encode, prefill, decode = [await cluster.metrics(stage) for stage in Stage]
    num_image_tokens = (await cluster.coordinator.wait_for_span("r1", "encode")).num_tokens
    spans = [s for s in cluster.coordinator.spans if s.name == "encode"]
    num_image_tokens = sum(span.num_tokens for span in spans)
    nbytes = num_image_tokens * language.hidden_size * 4
    assert encode['epd_embedding_bytes_moved_total{role="sent"}'] == nbytes
    assert prefill['epd_embedding_bytes_moved_total{role="received"}'] == nbytes
    num_blocks = -(-num_prompt_tokens // 16)
    per_token = language.num_layers * 2 * language.num_kv_heads * language.head_dim * 4
    assert prefill['epd_kv_bytes_moved_total{role="sent"}'] == num_blocks * 16 * per_token
    assert decode['epd_kv_bytes_moved_total{role="received"}'] == num_blocks * 16 * per_token


async def test_every_step_of_a_request_is_reported_as_a_span(cluster: Cluster):
    answer = await cluster.chat(cluster.body(CASES["one image"], "r1", max_tokens=5))
    names = ("encode", "embedding_handoff", "prefill", "kv_handoff", "decode")
    spans = {name: await cluster.coordinator.wait_for_span("r1", name) for name in names}
    assert spans["decode"].num_tokens == 5
    assert spans["prefill"].num_tokens == answer.body["usage"]["prompt_tokens"]
    assert spans["embedding_handoff"].nbytes > 0
    assert spans["kv_handoff"].nbytes > 0
    starts = [spans[name].start_unix_s for name in names]
    assert starts == sorted(starts)


async def test_an_image_seen_before_is_not_encoded_again(cluster: Cluster):
    first = await cluster.chat(cluster.body(CASES["one image"], "a"))
    again = await cluster.chat(cluster.body(CASES["one image"], "b"))
    twice = await cluster.chat(cluster.body(CASES["the same image twice"], "c"))
    assert first.text == again.text
    assert twice.status == 200
    metrics = await cluster.metrics(Stage.ENCODE)
    assert metrics["epd_encodes_total"] == 2
    assert metrics["epd_embedding_cache_hits_total"] == 2
    assert metrics['epd_arena_used_bytes{arena="embedding"}'] > 0
    await cluster.wait_at_rest()


@pytest.mark.parametrize("first", [Stage.PREFILL, Stage.DECODE])
async def test_prefill_and_decode_may_be_asked_in_any_order(cluster: Cluster, first: Stage):
    second = Stage.DECODE if first is Stage.PREFILL else Stage.PREFILL
    body = cluster.body(CASES["text only"], "r1", max_tokens=5)
    earlier = asyncio.create_task(cluster.post(first, body))
    if first is Stage.PREFILL:
        await cluster.coordinator.wait_for_span("r1", "prefill")
    else:
        await cluster.wait_for(Stage.DECODE, "epd_requests_running")
    answers: dict[Stage, Any] = {second: await cluster.post(second, body), first: await earlier}
    assert {answer.status for answer in answers.values()} == {200}
    assert answers[Stage.DECODE].body["usage"]["completion_tokens"] == 5
    await cluster.wait_at_rest()


async def test_requests_take_turns_in_a_pool_that_holds_one_of_them(model: Path, tmp_path: Path):
    shape = Checkpoint(model).language.kv_shape(torch.float32)
    async with running_cluster(model, tmp_path, kv_bytes=2**20) as cluster:
        pool_tokens = 2**20 // shape.block_bytes * shape.block_tokens
        context_tokens = cluster.workers[Stage.DECODE].identity.model.context_tokens
        first = await cluster.chat(cluster.body(CASES["text only"], "first", max_tokens=1))
        room = min(pool_tokens, context_tokens) - first.body["usage"]["prompt_tokens"]
        assert room > pool_tokens // 2, "two such requests do not fit together"
        bodies = [
            cluster.body(CASES["text only"], f"r{i}", max_tokens=room, stop=["e", "a", "o", "i"])
            for i in range(4)
        ]
        answers = await asyncio.gather(*(cluster.chat(body) for body in bodies))
        assert [answer.status for answer in answers] == [200] * 4
        await cluster.wait_at_rest()
