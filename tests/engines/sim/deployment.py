"""A real coordinator and a simulated fleet in this event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from epd.engines.sim import Profile, SimFleet, SimWorker
from epd.types import Stage
from tests.fakes.deployment import TOKEN, Deployment, deployed

ONE_OF_EACH = {Stage.ENCODE: 1, Stage.PREFILL: 1, Stage.DECODE: 1}


def profile(**sections: Any) -> Profile:
    """A profile ten times faster than life with short answers; `sections` override it."""
    fast = {"time_scale": 0.1, "answer": {"min_tokens": 8, "max_tokens": 24}}
    return Profile.model_validate({**fast, **sections})


def body(text: str, *images: str, **fields: Any) -> dict[str, Any]:
    """A request of a text and images (data URLs)."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in images
    ]
    content = [*parts, {"type": "text", "text": text}]
    return {"model": "sim", "messages": [{"role": "user", "content": content}], **fields}


@dataclass
class Simulated:
    coordinator: Deployment
    fleet: SimFleet

    async def ask(self, text: str, *images: str, **fields: Any) -> dict[str, Any]:
        """The whole answer of a request that must succeed."""
        answer = await self.coordinator.send(body(text, *images, **fields))
        assert answer.status == 200, answer.body
        return answer.json

    async def metric(self, worker_id: str, name: str) -> float:
        url = self.fleet[worker_id].identity.url + "/metrics"
        async with self.coordinator.session.get(url, headers=TOKEN.headers) as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    return sample.value
        raise AssertionError(f"{worker_id} has no {name}")

    def held(self) -> dict[str, int]:
        """What the workers hold for requests now; empty when idle."""
        found: dict[str, int] = {}
        for stage in Stage:
            for worker in self.fleet.of(stage):
                if worker.is_alive:
                    found |= _held_by(worker)
        return {what: amount for what, amount in found.items() if amount}

    async def settle(self) -> None:
        await until(lambda: not self.held(), lambda: f"still held: {self.held()}")


def _held_by(worker: SimWorker) -> dict[str, int]:
    me, load = worker.identity.worker_id, worker.shell.lease.load()
    held = {f"{me} handlers": len(worker.shell.requests), f"{me} running": load.num_running_reqs}
    if worker.config.stage is not Stage.ENCODE:  # an encode worker's embeddings are a cache
        held[f"{me} KV tokens"] = load.num_used_tokens
    return held


async def until(
    condition: Callable[[], object], complaint: Callable[[], str], timeout_s: float = 20.0
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(complaint()) from None


@asynccontextmanager
async def simulated(
    num_workers: Mapping[Stage, int] = ONE_OF_EACH,
    simulation: Profile | None = None,
    **config: Any,
) -> AsyncIterator[Simulated]:
    """Run both; at the end no worker may hold anything and no task may be left.

    Args:
        num_workers: of each stage.
        simulation: the workers' profile.
        **config: sections of `CoordinatorConfig`.
    """
    async with deployed(workers={}, **config) as coordinator:
        fleet = SimFleet(coordinator.url, TOKEN, num_workers, profile=simulation or profile())
        async with fleet:
            await fleet.wait_registered(timeout_s=60)
            both = Simulated(coordinator, fleet)
            yield both
            await both.settle()
