"""Simulated workers behind a real coordinator: answers, counts, caches, and many at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from epd.engines.sim import Profile
from epd.engines.sim.answer import build_answer
from epd.engines.sim.prompt import prompt_seed
from epd.types import Stage
from epd.wire import parse_chat_request
from tests.engines.sim.deployment import body, profile, simulated, until
from tests.fakes.deployment import TOKEN, data_url
from tests.media.images import png


def expected(text: str, simulation: Profile, max_tokens: int = 512) -> str:
    """The answer to a text, from the pure functions alone."""
    request = parse_chat_request(body(text))
    seed = prompt_seed(request, simulation.seed)
    return build_answer(seed, simulation.answer, max_new_tokens=max_tokens, stop_strings=[]).text


async def test_an_answer_follows_from_the_request_and_its_usage_counts_every_token() -> None:
    image = data_url(png(84, 112))
    async with simulated() as sim:
        plain = await sim.ask("What is this?")
        seen = await sim.ask("What is this?", image)
        again = await sim.ask("What is this?", image)
        other = await sim.ask("What is this?", data_url(png(84, 140)))
    text = plain["choices"][0]["message"]["content"]
    assert text == expected("What is this?", profile())
    numbers = [int("".join(filter(str.isdigit, word))) for word in text.split()]
    assert numbers == list(range(1, plain["usage"]["completion_tokens"] + 1))
    assert plain["choices"][0]["finish_reason"] == "stop"
    # 84 x 112 pixels are 6 x 8 patches of 14, merged by four; the image's two marks on top.
    assert seen["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"] == 12 + 2
    assert seen["choices"] == again["choices"]
    assert seen["choices"] != other["choices"]


async def test_max_tokens_cuts_an_answer_and_ignore_eos_fills_it() -> None:
    async with simulated() as sim:
        short = await sim.ask("hi", max_tokens=3)
        full = await sim.ask("hi", max_tokens=40, ignore_eos=True)
    assert short["usage"]["completion_tokens"] == 3
    assert full["usage"]["completion_tokens"] == 40
    assert [a["choices"][0]["finish_reason"] for a in (short, full)] == ["length", "length"]


async def test_a_stream_has_a_chunk_for_each_token_and_the_same_text() -> None:
    async with simulated() as sim:
        whole = await sim.ask("hi")
        streamed = await sim.coordinator.send(
            body("hi", stream=True, stream_options={"include_usage": True})
        )
    assert streamed.events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in streamed.events[:-1]]
    pieces = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    assert "".join(filter(None, pieces)) == whole["choices"][0]["message"]["content"]
    assert len(list(filter(None, pieces))) == whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_an_image_is_encoded_once_and_a_known_prefix_is_not_computed_again() -> None:
    image, text = data_url(png(280, 280)), "word " * 100
    async with simulated() as sim:
        await sim.ask(text, image)
        assert await sim.metric("prefill-0", "epd_cached_prompt_tokens_total") == 0
        await sim.ask(text + "and more", image)
        cached = await sim.metric("prefill-0", "epd_cached_prompt_tokens_total")
        num_encodes = await sim.metric("encode-0", "epd_encodes_total")
        num_hits = await sim.metric("encode-0", "epd_embedding_cache_hits_total")
    assert (num_encodes, num_hits) == (1, 1)
    # 100 image tokens, their marks and the text are equal: all full blocks of it are cached.
    assert 200 < cached < 240


async def test_decode_waits_for_room_and_prefill_keeps_the_kv_until_it_is_taken() -> None:
    tight = profile(
        decode={"kv_capacity_tokens": 64, "base_ms": 400.0},
        model={"context_tokens": 64},
        answer={"min_tokens": 32, "max_tokens": 32},
    )
    async with simulated(simulation=tight) as sim:
        decode = sim.fleet["decode-0"].shell.lease.load
        prefill = sim.fleet["prefill-0"].shell.lease.load
        first = asyncio.create_task(sim.ask("first", max_tokens=32))
        await until(lambda: decode().num_running_reqs, lambda: f"decode: {decode()}")
        second = asyncio.create_task(sim.ask("second", max_tokens=32))
        await until(lambda: decode().num_waiting_tokens, lambda: f"decode: {decode()}")
        assert not first.done()
        assert decode().num_used_tokens <= 64
        assert prefill().num_used_tokens > 0, "the second's KV waits at prefill"
        await asyncio.gather(first, second)


async def test_64_workers_in_one_process_register_and_answer_200_requests() -> None:
    images = [data_url(png(28 * (i + 1), 56)) for i in range(10)]
    counts = {Stage.ENCODE: 24, Stage.PREFILL: 16, Stage.DECODE: 24}
    async with simulated(counts) as sim:
        known = sim.coordinator.coordinator.registry.all()
        assert len(known) == len(sim.fleet) == 64
        assert len({worker.url for worker in known}) == 64

        at_once = asyncio.Semaphore(50)

        async def ask(i: int) -> dict[str, Any]:
            async with at_once:
                return await sim.ask(f"question {i}", *([images[i % 10]] if i % 2 else []))

        answers = await asyncio.gather(*(ask(i) for i in range(200)))
        used = [
            [w.shell.requests.num_completed for w in sim.fleet.of(stage)]
            for stage in (Stage.PREFILL, Stage.DECODE)
        ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[::2] == [expected(f"question {i}", profile()) for i in range(0, 200, 2)]
    assert len(set(texts)) == 200
    assert all(sum(completed) == 200 for completed in used)
    assert all(completed.count(0) == 0 for completed in used), "every worker takes part"


async def test_workers_leave_in_order_when_the_fleet_ends() -> None:
    async with simulated() as sim:
        registry = sim.coordinator.coordinator.registry
        await sim.fleet["encode-0"].stop()
        assert [w.state for w in registry.all() if w.worker_id == "encode-0"] in ([], ["gone"])


async def test_a_worker_is_closed_to_those_without_the_token() -> None:
    async with simulated() as sim:
        url = sim.fleet["decode-0"].identity.url + "/sim/faults"
        session = sim.coordinator.session
        async with session.post(url, json={"kind": "die"}) as refused:
            assert refused.status == 401
        async with session.get(url, headers=TOKEN.headers) as response:
            assert await response.json() == {"faults": [], "num_struck": 0}
        assert sim.fleet["decode-0"].is_alive


def test_the_engine_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "sys.modules['mooncake'] = None; import epd.engines.sim"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
