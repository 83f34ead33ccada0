"""The simulated vision tower: whatever images wait are encoded together."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from epd.engines.shell import WorkerMetrics
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import EncodeProfile


@dataclass(slots=True, eq=False)
class _Job:
    num_tokens: int
    slow_factor: float
    done: asyncio.Future[None] = field(repr=False)


class EncodeBatches:
    """The queue in front of the tower."""

    def __init__(self, profile: EncodeProfile, pace: Pace, metrics: WorkerMetrics) -> None:
        self._profile = profile
        self._pace = pace
        self._metrics = metrics
        self._waiting: deque[_Job] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(job.num_tokens for job in self._waiting)

    async def encode(self, num_tokens: int, slow_factor: float = 1.0) -> None:
        """Wait until an image of `num_tokens` is encoded.

        Cancellation takes one that waits out of the queue; in a running batch it saves no time.
        """
        job = _Job(num_tokens, slow_factor, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="simulated vision tower")
        try:
            await job.done
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            batch = self._take()
            work_ms = self._profile.batch_ms(sum(job.num_tokens for job in batch))
            seconds = self._pace.seconds(work_ms * max(job.slow_factor for job in batch))
            await self._pace.wait(seconds)
            self._metrics.encodes.inc(len(batch))
            self._metrics.step_seconds.labels("encode").observe(seconds)
            for job in batch:
                if not job.done.done():
                    job.done.set_result(None)

    def _take(self) -> list[_Job]:
        batch = [self._waiting.popleft()]
        num_tokens = batch[0].num_tokens
        while self._waiting:
            num_tokens += self._waiting[0].num_tokens
            if num_tokens > self._profile.max_batch_image_tokens:
                break
            batch.append(self._waiting.popleft())
        return batch
