"""Waiting until every worker of a deployment may be given work, with progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epd.config import PoolsConfig
from epd.errors import WorkerError
from epd.sdk import AdminClient
from epd.types import Stage, WorkerState

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Readiness:
    """Ready workers of each stage against those the deployment has."""

    ready: Mapping[Stage, int]
    wanted: Mapping[Stage, int]

    @property
    def is_complete(self) -> bool:
        return all(self.ready.get(stage, 0) >= count for stage, count in self.wanted.items())

    def __str__(self) -> str:
        parts = [f"{stage} {self.ready.get(stage, 0)}/{n}" for stage, n in self.wanted.items()]
        return ", ".join(parts)


async def watch_until_ready(
    client: AdminClient, pools: PoolsConfig, on_change: Callable[[Readiness], None]
) -> None:
    """Ask the coordinator for its workers until all of `pools` are ready.

    It has no deadline: a worker may load a model for minutes, and the caller knows how long it
    will wait. `on_change` is called at first and whenever the counts change.
    """
    wanted = {stage: pool.replicas for stage, pool in pools.items()}
    last: Readiness | None = None
    while True:
        ready: Counter[Stage] = Counter()
        try:
            workers = await client.workers()
        except WorkerError:
            workers = []  # The coordinator is still starting.
        ready.update(worker.stage for worker in workers if worker.state == WorkerState.READY)
        now = Readiness(dict(ready), wanted)
        if now != last:
            on_change(now)
            last = now
        if now.is_complete:
            return
        await asyncio.sleep(_POLL_S)
