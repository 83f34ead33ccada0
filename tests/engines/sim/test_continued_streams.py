"""A stream that breaks off goes on from other workers, and the client sees one stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from epd.engines.sim import Fault
from epd.types import Stage
from tests.engines.sim.deployment import Simulated, body, profile, simulated
from tests.fakes.deployment import Answer, data_url
from tests.media.images import png

TWELVE_WORDS = profile(answer={"min_tokens": 12, "max_tokens": 12})
THREE_DECODE = {Stage.ENCODE: 1, Stage.PREFILL: 2, Stage.DECODE: 3}
IN_TURN = {"prefill": "round_robin", "decode": "round_robin"}
PICTURE = data_url(png(84, 112))


async def stream(sim: Simulated, **fields: Any) -> Answer:
    options = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    return await sim.coordinator.send(body("count", PICTURE, **options))


def chunks(answer: Answer) -> list[Any]:
    """Its events, without what differs between any two requests."""
    payloads = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n")[:-1]]
    assert payloads[-1] == b"[DONE]"
    found = [json.loads(payload) for payload in payloads[:-1]]
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in found}) == 1
    return found


@pytest.mark.parametrize("kind", ["cut", "error", "die"])
@pytest.mark.parametrize("after_tokens", [1, 2, 7, 12])
async def test_the_client_sees_the_very_stream_it_would_have_seen(
    kind: str, after_tokens: int
) -> None:
    async with simulated(THREE_DECODE, TWELVE_WORDS, routing=IN_TURN) as sim:
        whole = await stream(sim)
        # Whoever of two comes next breaks off, and the other, if it takes over, later.
        for name in ("decode-1", "decode-2"):
            sim.fleet[name].faults.add(Fault(kind=kind, after_tokens=after_tokens, num_requests=1))
        answer = await stream(sim)
        record = await sim.coordinator.record(answer)
        assert len(record["retries"]) >= 1
        assert chunks(answer) == chunks(whole)
        assert (answer.status, record["outcome"]) == (200, "finished")
        assert record["num_output_tokens"] == 12
        assert b"token_ids" not in answer.body


@pytest.mark.parametrize("fields", [{"max_tokens": 7}, {"stop": ["6 "]}])
async def test_a_stop_string_and_a_limit_hold_across_the_cut(fields: dict[str, Any]) -> None:
    async with simulated(THREE_DECODE, TWELVE_WORDS, routing=IN_TURN) as sim:
        whole = await stream(sim, **fields)
        for name in ("decode-1", "decode-2"):
            sim.fleet[name].faults.add(Fault(kind="cut", after_tokens=4, num_requests=1))
        answer = await stream(sim, **fields)
        assert (await sim.coordinator.record(answer))["retries"]
        assert chunks(answer) == chunks(whole)


async def test_a_stream_goes_on_when_decode_hangs() -> None:
    hang = Fault(kind="hang", after_tokens=5, num_requests=1)
    async with simulated(THREE_DECODE, TWELVE_WORDS, routing=IN_TURN, retry={"hang_s": 0.5}) as sim:
        whole = await stream(sim)
        sim.fleet["decode-1"].faults.add(hang)
        answer = await stream(sim)
        assert chunks(answer) == chunks(whole)
        (reason,) = (await sim.coordinator.record(answer))["retries"]
        assert "has answered nobody" in reason


async def test_with_no_other_decode_worker_the_stream_ends_with_the_error() -> None:
    async with simulated(simulation=TWELVE_WORDS) as sim:
        sim.fleet["decode-0"].faults.add(Fault(kind="cut", after_tokens=5))
        answer = await stream(sim)
        *_, last, end = answer.body.split(b"\n\n")
        assert end == b""
        assert "decode-0" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
        assert b"token_ids" not in answer.body


async def test_many_streams_go_on_when_a_decode_worker_dies() -> None:
    async with simulated(
        {Stage.ENCODE: 2, Stage.PREFILL: 2, Stage.DECODE: 3},
        profile(answer={"min_tokens": 60, "max_tokens": 60}),
    ) as sim:
        whole = chunks(await stream(sim))
        pending = [asyncio.create_task(stream(sim)) for _ in range(30)]
        decode = sim.fleet["decode-1"]
        while not decode.shell.lease.load().num_used_tokens:  # noqa: ASYNC110 - has no event
            await asyncio.sleep(0.005)
        decode.faults.add(Fault(kind="die"))
        answers = await asyncio.gather(*pending)
        assert all(chunks(answer) == whole for answer in answers)
