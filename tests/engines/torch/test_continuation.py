"""An answer broken off after any token goes on elsewhere as if it had not been."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from epd.engines.torch.detokenizer import Detokenizer
from epd.engines.torch.engine import DecodeSlot
from epd.engines.torch.tiny import write_random_checkpoint
from epd.errors import BadRequestError
from epd.types import Stage
from tests.engines.torch.cluster import Answer, Cluster, running_cluster
from tests.reference import CASES, NUM_TOKENS

WITH_USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen2_5_vl", seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture
async def cluster(model: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, tmp_path) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["text only", "one image", "two adjacent images"])
def test_a_prompt_followed_by_any_part_of_its_answer_gives_the_rest(
    engine: Any, reference: Any, name: str
):
    expected = reference.generate(CASES[name])
    prompt, embeddings = engine.prepare(CASES[name])
    for num_generated in range(NUM_TOKENS):
        longer = prompt.followed_by(expected[:num_generated])
        assert longer.num_prompt_tokens == len(prompt.token_ids)
        block_ids = engine.pool.allocate(len(prompt.token_ids) + NUM_TOKENS)
        logits = engine.prefill.prefill(longer, embeddings, block_ids, chunk_tokens=7)
        num_tokens = len(longer.token_ids)
        slot = DecodeSlot(int(logits.argmax()), longer.next_position, num_tokens, block_ids)
        rest = engine.decode([slot], NUM_TOKENS - num_generated)[0]
        engine.pool.free(block_ids)
        assert expected[:num_generated] + rest == expected


def test_an_image_token_that_was_generated_stands_for_no_image(engine: Any):
    image_token_id = engine.checkpoint.image_token_id
    prompt, embeddings = engine.prepare(CASES["one image"])
    num_tokens = len(prompt.token_ids)
    block_ids = engine.pool.allocate(num_tokens + 2)
    engine.prefill.prefill(prompt, embeddings, block_ids, 2048)
    slot = DecodeSlot(image_token_id, prompt.next_position, num_tokens, block_ids)
    decoded = engine.decode([slot], 2)[0][1]
    longer = prompt.followed_by([image_token_id])
    logits = engine.prefill.prefill(longer, embeddings, block_ids, 2048)
    engine.pool.free(block_ids)
    assert int(logits.argmax()) == decoded


@pytest.mark.parametrize("stop", [[], ["e"], ["a b", "漢字"], ["🙂", "b c d"]])
def test_text_goes_on_where_it_was_after_any_token(tokenizer: Tokenizer, stop: list[str]):
    chance = random.Random(0)
    vocabulary = tokenizer.get_vocab_size()
    known = tokenizer.encode("naïve 漢 🙂 a b 漢字 b c de").ids
    num_withheld = 0
    for ids in [known, *([chance.randrange(vocabulary) for _ in range(20)] for _ in range(30))]:
        deltas = _deltas(tokenizer, ids, len(ids), stop)
        for num_before in range(len(deltas) + 1):
            sent = "".join(text for text, _ in deltas[:num_before])
            after = _deltas(tokenizer, ids, len(ids), stop, num_before)
            assert after == deltas[num_before:]
            num_withheld += sent != tokenizer.decode(ids[:num_before])
    assert num_withheld > 50, "some cuts are inside a character, or where a stop string may begin"


def test_tokens_after_the_end_are_refused(tokenizer: Tokenizer):
    ids = tokenizer.encode("one two three").ids
    for limit, stop in ((len(ids) - 1, []), (100, ["one"])):
        with pytest.raises(BadRequestError, match="answer ended") as caught:
            _deltas(tokenizer, ids, limit, stop, len(ids))
        assert caught.value.param == "continue_from.token_ids"


@pytest.mark.parametrize("name", ["text only", "one image"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 7}], ids=["greedy", "sampled"])
async def test_a_stream_cut_after_any_chunk_goes_on_with_the_very_next(
    cluster: Cluster, name: str, fields: dict[str, Any]
):
    chunks = await _whole(cluster, name, max_tokens=24, **fields)
    assert any(len(c["choices"][0]["token_ids"]) > 1 for c in chunks[:-2]), "one had to wait"
    assert chunks[-2]["usage"]["completion_tokens"] == len(_told(chunks))
    for num_sent in range(1, len(chunks) - 2):
        rest = await _rest(cluster, name, chunks[:num_sent], max_tokens=24, **fields)
        assert (rest.status, rest.chunks) == (200, chunks[num_sent:])
    await cluster.wait_at_rest()


async def test_a_stop_string_is_found_though_its_beginning_was_held_back_at_the_cut(
    cluster: Cluster, tokenizer: Tokenizer
):
    name = "a system message"
    chunks = await _whole(cluster, name, max_tokens=24)
    middle = [c["choices"][0]["delta"]["content"] for c in chunks[6:-3]]
    num_held = 0
    for stop in (
        middle[0][-1] + middle[1][0],
        middle[1][-1] + middle[2] + middle[3][0],
        "".join(middle[2:6]),
    ):
        stops = [stop, middle[0] + "not this"]
        chunks = await _whole(cluster, name, max_tokens=24, stop=stops)
        assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
        for num_sent in range(1, len(chunks) - 2):
            rest = await _rest(cluster, name, chunks[:num_sent], max_tokens=24, stop=stops)
            assert rest.chunks == chunks[num_sent:]
            sent = Answer(200, None, chunks[:num_sent])
            num_held += sent.text != tokenizer.decode(_told(sent.chunks))
    assert num_held, "a cut came where text was held back"
    await cluster.wait_at_rest()


async def test_tokens_are_told_only_to_who_asks(cluster: Cluster):
    plain = await cluster.chat(cluster.body(CASES["text only"], "a", stream=True))
    assert all("token_ids" not in chunk["choices"][0] for chunk in plain.chunks[:-1])
    told = await cluster.chat(
        cluster.body(CASES["text only"], "a", stream=True, return_token_ids=True)
    )
    for chunk in told.chunks[:-1]:
        assert list(chunk["choices"][0])[-1] == "token_ids"
        del chunk["choices"][0]["token_ids"]
        chunk["created"] = plain.chunks[0]["created"]
    assert told.chunks == plain.chunks


async def test_prefill_computes_all_and_decode_counts_only_its_own(cluster: Cluster):
    chunks = await _whole(cluster, "one image", max_tokens=24)
    sent = chunks[:5]
    await _rest(cluster, "one image", sent, rid="again", max_tokens=24)
    num_sent, num_all = len(_told(sent)), len(_told(chunks))
    prefill = await cluster.coordinator.wait_for_span("again", "prefill")
    decode = await cluster.coordinator.wait_for_span("again", "decode")
    assert prefill.num_tokens == chunks[-2]["usage"]["prompt_tokens"] + num_sent
    assert decode.num_tokens == num_all - num_sent


@pytest.mark.parametrize(
    ("token_ids", "param"),
    [
        ("abc", "continue_from.token_ids"),
        (None, "continue_from.token_ids"),
        ([1, "2"], "continue_from.token_ids[1]"),
        ([1, 2.5], "continue_from.token_ids[1]"),
        ([-1], "continue_from.token_ids[0]"),
        ([True], "continue_from.token_ids[0]"),
        ([1, 2**40], "continue_from.token_ids[1]"),
        ([5] * 9, "continue_from.token_ids"),
    ],
)
async def test_what_cannot_be_continued_is_refused_by_name(
    cluster: Cluster, token_ids: Any, param: str
):
    fields = {"stream": True, "max_tokens": 8, "continue_from": {"token_ids": token_ids}}
    answer = await cluster.chat(cluster.body(CASES["text only"], "r", **fields))
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    await cluster.wait_at_rest()


STOP = ["e", "a", "i", "o"]


async def test_a_finished_answer_is_not_gone_on_with(cluster: Cluster):
    chunks = await _whole(cluster, "text only", max_tokens=8, stop=STOP)
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    begun = {"token_ids": [*_told(chunks), 5]}
    body = cluster.body(
        CASES["text only"], "r", stream=True, stop=STOP, continue_from=begun, max_tokens=30
    )
    prefill = asyncio.create_task(cluster.post(Stage.PREFILL, body))
    answer = await cluster.post(Stage.DECODE, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, "continue_from.token_ids")
    await cluster.abort("r", Stage.PREFILL)
    await prefill
    await cluster.wait_at_rest()


async def test_workers_say_whether_they_can_continue(cluster: Cluster):
    can = {report.stage: report.can_continue for report in cluster.coordinator.reports}
    assert can == {Stage.ENCODE: False, Stage.PREFILL: True, Stage.DECODE: True}


def _deltas(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    max_new_tokens: int,
    stop: Sequence[str],
    num_before: int = 0,
) -> list[tuple[str, str | None]]:
    """Text and finish reason after each token but the first `num_before`."""
    detokenizer = Detokenizer(
        tokenizer, eos_token_ids=[], max_new_tokens=max_new_tokens, stop_strings=stop
    )
    detokenizer.replay(token_ids[:num_before])
    deltas: list[tuple[str, str | None]] = []
    for token_id in token_ids[num_before:]:
        if detokenizer.finish_reason is not None:
            break
        delta = detokenizer.push(token_id)
        deltas.append((delta.text, delta.finish_reason))
    assert detokenizer.num_tokens == num_before + len(deltas)
    return deltas


def _told(chunks: list[Any]) -> list[int]:
    choices = [c["choices"][0] for c in chunks if c != "[DONE]" and c["choices"]]
    return [token_id for choice in choices for token_id in choice["token_ids"]]


async def _whole(cluster: Cluster, name: str, **fields: Any) -> list[Any]:
    options = {"stream": True, "return_token_ids": True, "stream_options": WITH_USAGE}
    answer = await cluster.chat(cluster.body(CASES[name], "whole", **options, **fields))
    assert answer.status == 200
    assert answer.chunks[-1] == "[DONE]"
    return answer.chunks


async def _rest(
    cluster: Cluster, name: str, sent: list[Any], rid: str = "rest", **fields: Any
) -> Answer:
    """What follows the chunks `sent`, as the coordinator asks for it."""
    begun = {"token_ids": _told(sent), "id": sent[0]["id"], "created": sent[0]["created"]}
    options = {"stream": True, "return_token_ids": True, "stream_options": WITH_USAGE}
    body = cluster.body(CASES[name], rid, continue_from=begun, **options, **fields)
    return await cluster.chat(body)
