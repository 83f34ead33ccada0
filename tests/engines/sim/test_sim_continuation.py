"""An answer that one simulated decode worker breaks off goes on at another, word by word."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import count
from typing import Any

import aiohttp
import pytest

from epd.engines.sim import Fault
from epd.types import Stage
from tests.engines.sim.deployment import Simulated, body, profile, simulated
from tests.fakes.deployment import TOKEN

TWO_PAIRS = {Stage.ENCODE: 1, Stage.PREFILL: 2, Stage.DECODE: 2}
TWELVE_WORDS = profile(answer={"min_tokens": 12, "max_tokens": 12})
ROOMS = count(1)


async def ask(sim: Simulated, number: int = 0, **fields: Any) -> tuple[int, list[Any]]:
    """Ask the pair `number`, as the coordinator does: status, and events as far as they came."""
    prefill, decode = sim.fleet[f"prefill-{number}"], sim.fleet[f"decode-{number}"]
    room = next(ROOMS)
    place = {
        "rid": f"r{room}",
        "bootstrap_room": room,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.identity.bootstrap_port,
    }
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = body("count", **place, **options, **fields)
    first = asyncio.create_task(_post(sim, prefill.identity.url, request))
    try:
        return await _post(sim, decode.identity.url, request)
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def _post(sim: Simulated, url: str, request: dict[str, Any]) -> tuple[int, list[Any]]:
    raw = b""
    async with sim.coordinator.session.post(
        f"{url}/v1/chat/completions", json=request, headers=TOKEN.headers
    ) as response:
        with contextlib.suppress(aiohttp.ClientError):
            async for piece in response.content.iter_any():
                raw += piece
    if response.content_type == "application/json":
        return response.status, [json.loads(raw)]
    payloads = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n")[:-1]]
    return response.status, [p if p == b"[DONE]" else json.loads(p) for p in payloads]


def told(chunks: list[Any]) -> list[int]:
    choices = [c["choices"][0] for c in chunks if c != b"[DONE]" and c["choices"]]
    return [token_id for choice in choices for token_id in choice["token_ids"]]


def begun(chunks: list[Any]) -> dict[str, Any]:
    head = chunks[0]
    return {"token_ids": told(chunks), "id": head["id"], "created": head["created"]}


@pytest.mark.parametrize(
    ("fields", "finish_reason"),
    [({}, "stop"), ({"max_tokens": 7}, "length"), ({"stop": ["5 ", "3 4"]}, "stop")],
)
async def test_a_stream_cut_after_any_chunk_goes_on_with_the_very_next(
    fields: dict[str, Any], finish_reason: str
) -> None:
    async with simulated(TWO_PAIRS, TWELVE_WORDS) as sim:
        status, chunks = await ask(sim, **fields)
        assert (status, chunks[-1]) == (200, b"[DONE]")
        assert chunks[-3]["choices"][0]["finish_reason"] == finish_reason
        assert chunks[-2]["usage"]["completion_tokens"] == len(told(chunks))
        for num_sent in range(1, len(chunks) - 2):
            place = begun(chunks[:num_sent])
            assert await ask(sim, 1, continue_from=place, **fields) == (200, chunks[num_sent:])


async def test_what_a_broken_stream_told_is_enough_to_go_on_elsewhere() -> None:
    async with simulated(TWO_PAIRS, TWELVE_WORDS) as sim:
        _, chunks = await ask(sim, temperature=0)
        sim.fleet["decode-0"].faults.add(Fault(kind="cut", after_tokens=5, num_requests=1))
        _, sent = await ask(sim)
        assert 1 < len(told(sent)) <= 5
        status, rest = await ask(sim, 1, continue_from=begun(sent))
        assert status == 200
        assert told(sent) + told(rest) == told(chunks)
        assert [c["choices"][0]["delta"] for c in (*sent, *rest)[:-2]] == [
            c["choices"][0]["delta"] for c in chunks[:-2]
        ]


async def test_a_fault_that_waits_for_tokens_finds_those_that_are_continued_from() -> None:
    async with simulated(TWO_PAIRS, TWELVE_WORDS) as sim:
        _, chunks = await ask(sim)
        sim.fleet["decode-0"].faults.add(Fault(kind="error", after_tokens=3, num_requests=1))
        status, _ = await ask(sim, continue_from=begun(chunks[:6]))
        assert status == 500
        status, rest = await ask(sim, continue_from=begun(chunks[:6]))
        assert (status, rest) == (200, chunks[6:])


async def test_prefill_finds_the_prompt_cached_and_computes_the_answer_behind_it() -> None:
    long = profile(answer={"min_tokens": 40, "max_tokens": 40}, model={"block_tokens": 4})
    async with simulated(TWO_PAIRS, long) as sim:
        _, chunks = await ask(sim)
        num_prompt = chunks[-2]["usage"]["prompt_tokens"]
        before = await sim.metric("prefill-0", "epd_prompt_tokens_total")
        assert before == num_prompt
        await ask(sim, continue_from=begun(chunks[:31]))
        assert await sim.metric("prefill-0", "epd_prompt_tokens_total") == 2 * num_prompt + 30
        cached = await sim.metric("prefill-0", "epd_cached_prompt_tokens_total")
        assert cached == num_prompt // 4 * 4


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda ids: [*ids[:2], ids[2] ^ 1], "continue_from.token_ids[2]"),
        (lambda ids: [*ids[:2], 99], "continue_from.token_ids[2]"),
        (lambda ids: [str(i) for i in ids], "continue_from.token_ids[0]"),
        (lambda ids: ids[:8], "continue_from.token_ids"),  # longer than max_tokens
    ],
)
async def test_tokens_of_another_answer_are_refused(change: Any, param: str) -> None:
    async with simulated(TWO_PAIRS, TWELVE_WORDS) as sim:
        _, chunks = await ask(sim)
        place = {"token_ids": change(told(chunks))}
        status, answer = await ask(sim, max_tokens=7, continue_from=place)
        assert (status, answer[0]["error"]["param"]) == (400, param)
