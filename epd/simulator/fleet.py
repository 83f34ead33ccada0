"""A fleet in simulated time: servers of the three stages, and the registry that knows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from epd.clock import FakeClock
from epd.engines.sim.profile import Profile
from epd.pools.registry import Registry, Worker
from epd.simulator.requests import MODEL_ID
from epd.simulator.servers import DecodeServer, EncodeServer, PrefillServer
from epd.types import Stage, WorkerId, WorkerState
from epd.wire import ModelCard, WorkerReport

_HEARTBEAT_S = 1.0  # the default of `coordinator.lease.heartbeat_s`
_LEASE_S = 5.0

ServerT = TypeVar("ServerT", EncodeServer, PrefillServer, DecodeServer)


@dataclass(frozen=True, slots=True)
class Split:
    """Workers by stage; each has one GPU."""

    encode: int
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.encode}E{self.prefill}P{self.decode}D"

    @property
    def num_gpus(self) -> int:
        return self.encode + self.prefill + self.decode


class Pool(Generic[ServerT]):
    """The servers of one stage."""

    def __init__(self, stage: Stage, servers: list[ServerT]) -> None:
        self.stage = stage
        self.servers = {
            WorkerId(f"{stage.value}-{index}"): server for index, server in enumerate(servers)
        }

    def of(self, worker: Worker) -> ServerT:
        """The server behind a worker of the registry."""
        return self.servers[worker.worker_id]

    def __iter__(self) -> Iterator[ServerT]:
        return iter(self.servers.values())


class Fleet:
    """All servers, on one node, and what the coordinator knows of them.

    Args:
        split: how many of each stage.
        profile: how fast they are and how much they hold.
        clock: simulated time.
        seed: of the jitter of their times.
    """

    def __init__(self, split: Split, profile: Profile, clock: FakeClock, seed: int) -> None:
        def pool(stage: Stage, build: type[ServerT], number: int) -> Pool[ServerT]:
            return Pool(
                stage,
                [build(profile, clock, Random(f"{seed} {stage} {n}")) for n in range(number)],
            )

        self.encode = pool(Stage.ENCODE, EncodeServer, split.encode)
        self.prefill = pool(Stage.PREFILL, PrefillServer, split.prefill)
        self.decode = pool(Stage.DECODE, DecodeServer, split.decode)
        self._pools: tuple[Pool[Any], ...] = (self.encode, self.prefill, self.decode)
        self.registry = Registry(clock, lease_s=_LEASE_S)
        self.profile = profile
        self._card = ModelCard(
            model_id=MODEL_ID,
            model_type=profile.model.model_type,
            context_tokens=profile.model.context_tokens,
        )
        self.report()

    def ready(self, stage: Stage) -> list[Worker]:
        """The workers of a stage, as the coordinator sees them."""
        return self.registry.ready(stage, MODEL_ID)

    def report(self) -> None:
        """Every worker's heartbeat."""
        for pool in self._pools:
            for worker_id, server in pool.servers.items():
                self.registry.report(
                    WorkerReport(
                        worker_id=worker_id,
                        epoch=1,
                        stage=pool.stage,
                        engine="sim",
                        state=WorkerState.READY,
                        url="http://one-node",
                        encode_window=self.profile.encode.window,
                        model=self._card,
                        load=server.load(),
                    )
                )

    async def beat(self) -> None:
        """Report as often as workers do, until cancelled."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            self.report()

    @property
    def is_idle(self) -> bool:
        """Whether no server holds anything of a request."""
        return all(server.is_idle for pool in self._pools for server in pool)

    async def close(self) -> None:
        for pool in self._pools:
            for server in pool:
                await server.close()
