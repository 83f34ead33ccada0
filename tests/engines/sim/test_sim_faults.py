"""Faults on command, as a coordinator and its clients see them; afterwards nothing is held."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from epd.engines.sim import Fault
from epd.engines.sim.worker import CALLS
from epd.errors import BadRequestError
from epd.types import Stage
from tests.engines.sim.deployment import ONE_OF_EACH, Simulated, body, profile, simulated, until
from tests.fakes.deployment import TOKEN, data_url
from tests.media.images import png

IMAGE = data_url(png(56, 56))
SLOW_DECODE = profile(decode={"base_ms": 100.0}, answer={"min_tokens": 20, "max_tokens": 20})


async def status(sim: Simulated, text: str = "hi", *images: str, **fields: Any) -> int:
    return (await sim.coordinator.send(body(text, *images, **fields))).status


@pytest.mark.parametrize("worker_id", ["encode-0", "prefill-0", "decode-0"])
async def test_an_error_strikes_as_many_calls_as_were_asked_for(worker_id: str) -> None:
    async with simulated() as sim:
        faults = sim.fleet[worker_id].faults
        faults.add(Fault(kind="error", num_requests=1))
        assert await status(sim, "hi", IMAGE) >= 500
        assert faults.num_struck == 1
        assert faults.active == []
        assert await status(sim, "hi", IMAGE) == 200


@pytest.mark.parametrize("worker_id", ["encode-0", "prefill-0", "decode-0"])
async def test_a_call_that_hangs_goes_on_when_the_fault_is_cleared(worker_id: str) -> None:
    async with simulated() as sim:
        faults = sim.fleet[worker_id].faults
        faults.add(Fault(kind="hang"))
        asked = asyncio.create_task(status(sim, "hi", IMAGE))
        await until(lambda: faults.num_struck, lambda: "nothing was struck")
        await asyncio.sleep(0.1)
        assert not asked.done()
        assert sim.fleet[worker_id].is_alive
        faults.clear()
        assert await asked == 200


async def test_a_fault_of_one_call_leaves_the_others_alone() -> None:
    async with simulated() as sim:
        faults = sim.fleet["encode-0"].faults
        faults.add(Fault(kind="error", call="/send"))
        assert await status(sim, "hi", IMAGE) >= 500
        assert await sim.metric("encode-0", "epd_encodes_total") == 1
        assert await status(sim, "no image") == 200


async def test_a_fault_is_over_after_its_time() -> None:
    async with simulated() as sim:
        faults = sim.fleet["decode-0"].faults
        faults.add(Fault(kind="error", for_s=0.05))
        assert len(faults.active) == 1
        await until(lambda: not faults.active, lambda: "the fault is not over")
        assert await status(sim) == 200


async def test_slow_multiplies_the_time_of_the_work() -> None:
    slow = profile(prefill={"base_ms": 200.0}, decode={"base_ms": 1.0})
    async with simulated(simulation=slow) as sim:
        await sim.ask("as usual")
        sim.fleet["prefill-0"].faults.add(Fault(kind="slow", factor=20, num_requests=1))
        await sim.ask("slow")
        await sim.ask("as usual again")
        histogram = await sim.metric("prefill-0", "epd_step_seconds_sum")
    # 0.02 s, 0.4 s and 0.02 s; a busy machine only adds to it.
    assert histogram >= 0.44


@pytest.mark.parametrize(("kind", "last"), [("cut", b"error"), ("error", b"an injected fault")])
async def test_a_stream_fails_after_the_tokens_that_were_asked_for(kind: Any, last: bytes) -> None:
    async with simulated() as sim:
        sim.fleet["decode-0"].faults.add(Fault(kind=kind, after_tokens=3, num_requests=1))
        answer = await sim.coordinator.send(body("hi", stream=True))
        assert answer.status == 200
        assert last in answer.events[-1]
        num_tokens = sum(b'"content": "' in event for event in answer.events) - 1
        assert num_tokens == 3
        await until(lambda: ready(sim) == 3, lambda: f"{ready(sim)} workers are ready")
        assert await status(sim) == 200


@pytest.mark.parametrize("worker_id", ["encode-0", "prefill-0", "decode-0"])
async def test_a_cut_connection_costs_one_request(worker_id: str) -> None:
    async with simulated() as sim:
        sim.fleet[worker_id].faults.add(Fault(kind="cut", num_requests=1))
        assert await status(sim, "hi", IMAGE) == 502
        await until(lambda: ready(sim) == 3, lambda: f"{ready(sim)} workers are ready")
        assert await status(sim, "hi", IMAGE) == 200


async def test_a_dead_worker_breaks_what_it_runs_and_comes_back_with_a_new_epoch() -> None:
    async with simulated(simulation=SLOW_DECODE) as sim:
        worker = sim.fleet["decode-0"]
        epoch, url = worker.identity.epoch, worker.identity.url
        asked = asyncio.create_task(status(sim))
        await until(lambda: worker.shell.lease.load().num_running_reqs, lambda: "nothing runs")
        worker.faults.add(Fault(kind="die"))
        assert not worker.is_alive
        assert await asked == 502
        with pytest.raises(aiohttp.ClientConnectorError):
            await sim.coordinator.session.get(url + "/health")
        await worker.start()
        assert worker.identity.epoch > epoch
        await sim.fleet.wait_registered(timeout_s=20)
        assert await status(sim) == 200


async def test_a_worker_dies_at_the_call_that_was_named() -> None:
    async with simulated({**ONE_OF_EACH, Stage.ENCODE: 2}) as sim:
        for worker in sim.fleet.of(Stage.ENCODE):
            worker.faults.add(Fault(kind="die", call="/send"))
        await status(sim, "hi", IMAGE)
        survivors = sum(worker.is_alive for worker in sim.fleet.of(Stage.ENCODE))
    assert survivors < 2


async def test_refused_connections_leave_the_running_answer_alone_and_the_port_kept() -> None:
    async with simulated(simulation=SLOW_DECODE) as sim:
        worker = sim.fleet["decode-0"]
        url = worker.identity.url + "/health"
        asked = asyncio.create_task(status(sim))
        await until(lambda: worker.shell.lease.load().num_running_reqs, lambda: "nothing runs")
        worker.faults.add(Fault(kind="refuse"))
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as stranger:
                for _ in range(100):  # until the socket is closed, a moment from now
                    await stranger.get(url, headers={"Connection": "close"})
        assert await asked == 200
        worker.faults.clear()
        await until(lambda: worker.is_listening, lambda: "the socket is still closed")
        async with sim.coordinator.session.get(url) as response:
            assert response.status == 200


async def test_faults_are_given_and_cleared_over_http() -> None:
    async with simulated() as sim:
        url = sim.fleet["prefill-0"].identity.url + "/sim/faults"
        session = sim.coordinator.session
        fault = {"kind": "error", "call": "/v1/chat/completions"}
        async with session.post(url, json=fault, headers=TOKEN.headers) as response:
            assert (await response.json())["faults"] == [fault]
        assert await status(sim) == 502
        async with session.delete(url, headers=TOKEN.headers) as response:
            assert await response.json() == {"faults": [], "num_struck": 1}
        assert await status(sim) == 200


@pytest.mark.parametrize(
    ("fault", "param"),
    [
        ({"kind": "explode"}, "kind"),
        ({"kind": "hang", "call": "/encode"}, "call"),
        ({"kind": "refuse"}, "for_s"),
        ({"kind": "cut", "factor": 2}, None),
        ({"kind": "cut", "factr": 2}, "factr"),
    ],
)
async def test_a_fault_that_makes_no_sense_is_refused(fault: Any, param: str | None) -> None:
    async with simulated() as sim:
        url = sim.fleet["decode-0"].identity.url + "/sim/faults"
        async with sim.coordinator.session.post(url, json=fault, headers=TOKEN.headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
        assert sim.fleet["decode-0"].faults.active == []


async def test_a_fault_can_strike_exactly_the_calls_of_its_stage() -> None:
    async with simulated() as sim:
        for stage in Stage:
            worker = sim.fleet.of(stage)[0]
            routes = worker.stage.routes()
            assert list(CALLS[stage]) == [re.sub(r":[^}]*", "", route.path) for route in routes]
            with pytest.raises(BadRequestError, match="this stage has no /health"):
                worker.faults.add(Fault(kind="error", call="/health"))


def ready(sim: Simulated) -> int:
    return sum(w.state == "ready" for w in sim.coordinator.coordinator.registry.all())
