"""Runs the vision tower over whatever images wait, several at a time.

While one batch computes the next one gathers, so batches grow with the load and a lone image does
not wait for company.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from epd.clock import Clock
from epd.engines.shell import ComputeThread, WorkerMetrics
from epd.engines.torch.image_processor import Patches
from epd.engines.torch.memory import finish
from epd.engines.torch.vision import VisionEncoder
from epd.errors import EPDError, WorkerError

MAX_BATCH_PATCHES = 16_384


@dataclass(slots=True, eq=False)
class _Job:
    patches: Patches
    destination: Tensor
    done: asyncio.Future[None] = field(repr=False)


class EncodeBatches:
    """The queue in front of the vision tower."""

    def __init__(
        self,
        encoder: VisionEncoder,
        *,
        compute: ComputeThread,
        clock: Clock,
        metrics: WorkerMetrics,
        device: str,
        max_patches: int = MAX_BATCH_PATCHES,
    ) -> None:
        self._encoder = encoder
        self._compute = compute
        self._clock = clock
        self._metrics = metrics
        self._device = device
        self._max_patches = max_patches
        self._waiting: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def encode(self, patches: Patches, destination: Tensor) -> None:
        """Encode one image into `destination`, `[num_image_tokens, hidden_size]`.

        Cancellation takes an image that waits out of the queue; one that is being computed is
        waited for, since `destination` is being written.

        Raises:
            WorkerError: the computation failed.
        """
        job = _Job(patches, destination, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        try:
            await asyncio.shield(job.done)
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
            else:
                await _until_done(job.done)
            raise

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_patches(self) -> int:
        return sum(job.patches.grid.num_patches for job in self._waiting)

    async def _run(self) -> None:
        while self._waiting:
            batch = self._take()
            try:
                await self._compute.run(self._encode, batch)
            except EPDError as error:
                _end(batch, error)
            except Exception as exc:
                error = WorkerError(f"the vision tower failed: {type(exc).__name__}")
                error.__cause__ = exc
                _end(batch, error)
            else:
                self._metrics.encodes.inc(len(batch))
                _end(batch, None)

    def _take(self) -> list[_Job]:
        batch = [self._waiting.popleft()]
        total = batch[0].patches.grid.num_patches
        while self._waiting:
            total += self._waiting[0].patches.grid.num_patches
            if total > self._max_patches:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _encode(self, batch: list[_Job]) -> None:
        began_s = self._clock.monotonic()
        embeddings = self._encoder.run([job.patches for job in batch])
        for job, embedding in zip(batch, embeddings, strict=True):
            job.destination.copy_(embedding.values)
        finish(self._device)
        self._metrics.step_seconds.labels("encode").observe(self._clock.monotonic() - began_s)


def _end(batch: list[_Job], error: EPDError | None) -> None:
    for job in batch:
        if error is not None:
            job.done.set_exception(error)
            job.done.exception()  # seen, even if the waiter has left
        else:
            job.done.set_result(None)


async def _until_done(done: asyncio.Future[None]) -> None:
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            continue  # the first cancellation is raised when the computation has ended
