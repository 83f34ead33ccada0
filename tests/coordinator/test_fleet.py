"""Servers that others started, watched and reported by the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from epd.clock import FakeClock
from epd.config import CoordinatorConfig, ExistingServer
from epd.coordinator.fleet import ServerWatch
from epd.pools.registry import Registry
from epd.pools.routing import Place
from epd.types import Stage, WorkerState
from epd.wire import ModelCard

CARD = ModelCard(model_id="vl", model_type="qwen2_vl", context_tokens=128)
LEASE_S = 5.0


class FakeProbe:
    def __init__(self) -> None:
        self.is_up = True
        self.loads: Mapping[str, Any] | None = {"loads": [{"num_running_reqs": 3}]}

    async def is_ready(self) -> bool:
        return self.is_up

    async def ask(self) -> tuple[bool, Mapping[str, Any] | None]:
        return self.is_up, self.loads if self.is_up else None


class Watched:
    """One server, its watch and the registry that hears of it, on one fake clock."""

    def __init__(self, stage: str = "prefill") -> None:
        self.clock = FakeClock()
        self.probe = FakeProbe()
        self.registry = Registry(self.clock, lease_s=LEASE_S)
        server = ExistingServer(
            url="http://10.0.0.7:30000", stage=Stage(stage), model="m", labels={"zone": "a"}
        )
        self.watch = ServerWatch(
            server,
            CARD,
            self.probe,
            self.registry.report,
            self.clock,
            heartbeat_s=1.0,
            lease_s=LEASE_S,
        )

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            await self.watch.look()
            self.registry.expire()

    @property
    def states(self) -> list[WorkerState]:
        return [worker.state for worker in self.registry.all()]


@pytest.mark.parametrize(("stage", "port"), [("encode", None), ("prefill", 8998), ("decode", None)])
async def test_a_running_server_is_a_worker_like_ours(stage: str, port: int | None) -> None:
    watched = Watched(stage)
    await watched.pass_time(1)
    (worker,) = watched.registry.ready(Stage(stage), "vl")
    assert worker.worker_id == f"{stage}-10.0.0.7-30000"
    assert worker.place == Place("10.0.0.7", zone="a")
    assert worker.report.bootstrap_port == port
    assert worker.report.load.num_running_reqs == 3


async def test_a_server_that_is_not_up_yet_joins_when_it_is() -> None:
    watched = Watched()
    watched.probe.is_up = False
    await watched.pass_time(3)
    assert watched.states == []
    watched.probe.is_up = True
    await watched.pass_time(1)
    assert watched.states == [WorkerState.READY]


async def test_a_silent_server_is_lost_with_its_lease_and_comes_back_as_another_life() -> None:
    watched = Watched()
    await watched.pass_time(1)
    (worker,) = watched.registry.all()
    watched.probe.is_up = False
    await watched.pass_time(3)
    assert watched.states == [WorkerState.READY]
    await watched.pass_time(4)
    assert watched.states == [WorkerState.LOST]
    assert worker.lost.is_set()
    watched.probe.is_up = True
    await watched.pass_time(1)
    assert watched.states == [WorkerState.READY]
    assert watched.registry.all()[0].report.epoch > worker.report.epoch


async def test_a_server_with_work_that_does_not_move_is_lost_until_it_moves() -> None:
    watched = Watched()
    await watched.pass_time(1)
    watched.probe.loads = {"loads": [{"num_running_reqs": 3, "timestamp": 1.0}]}
    await watched.pass_time(34)
    assert watched.states == [WorkerState.READY]
    await watched.pass_time(4)
    assert watched.states == [WorkerState.LOST]
    watched.probe.loads = {"loads": [{"num_running_reqs": 3, "timestamp": 2.0}]}
    await watched.pass_time(2)
    assert watched.states == [WorkerState.READY]


def test_servers_are_named_in_the_file() -> None:
    config = CoordinatorConfig.model_validate(
        {"fleet": [{"url": "http://h:1/", "stage": "decode", "model": "m"}]}
    )
    assert config.fleet[0].url == "http://h:1"
