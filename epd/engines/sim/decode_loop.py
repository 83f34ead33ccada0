"""Simulated continuous batching: every running sequence gets one token per step."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from epd.clock import Clock
from epd.engines.shell import WorkerMetrics
from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import DecodeProfile
from epd.errors import DeadlineError


@dataclass(slots=True, eq=False)
class Running:
    """One sequence, from `join` until it has its tokens or `leave`."""

    num_tokens: int
    """Tokens of the whole answer."""
    num_kv_tokens: int
    """Grows with each step."""
    slow_factor: float
    num_done: int = 1
    """Prefill has computed the first, or the one after those that are continued from."""
    num_wanted: int = 1
    has_wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self) -> None:
        self.num_done += 1
        self.num_kv_tokens += 1
        if self.num_done >= self.num_wanted:
            self.has_wanted.set()

    async def wait(self, num_wanted: int, timeout_s: float) -> int:
        """Return the number of tokens that are there, once it is `num_wanted` or more.

        Raises:
            DeadlineError: no progress at all in `timeout_s`.
        """
        self.num_wanted = num_wanted
        while self.num_done < num_wanted:
            before = self.num_done
            self.has_wanted.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.has_wanted.wait()
            except TimeoutError:
                if self.num_done == before:
                    raise DeadlineError(f"decode computed nothing for {timeout_s:g} s") from None
        return self.num_done


class DecodeLoop:
    """The running batch, and those that wait for a place in it."""

    def __init__(
        self, profile: DecodeProfile, pace: Pace, clock: Clock, metrics: WorkerMetrics
    ) -> None:
        self._profile = profile
        self._pace = pace
        self._clock = clock
        self._metrics = metrics
        self._joining: deque[Running] = deque()
        self._running: list[Running] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def join(self, running: Running) -> None:
        """Compute the rest of the sequence's tokens, from the next step on."""
        if running.num_done >= running.num_tokens:
            return
        self._joining.append(running)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="simulated decode loop")

    def leave(self, running: Running) -> None:
        """Compute no more of it; no effect if it has all."""
        for sequences in (self._joining, self._running):
            if running in sequences:
                sequences.remove(running)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        moment_s = self._clock.monotonic()
        while self._admit():
            seconds = self._pace.seconds(self._step_ms())
            # From step to step, not from waking to waking: that the loop wakes late by a
            # millisecond does not add up. After a longer standstill nothing is made up for.
            moment_s = max(moment_s + seconds, self._clock.monotonic())
            await self._pace.reach(moment_s)
            self._metrics.step_seconds.labels("decode").observe(seconds)
            for running in self._running:
                running.advance()
            self._running = [r for r in self._running if r.num_done < r.num_tokens]

    def _admit(self) -> bool:
        """Between two steps: who waits comes in; whether anybody runs."""
        while self._joining and len(self._running) < self._profile.max_running_requests:
            self._running.append(self._joining.popleft())
        return bool(self._running)

    def _step_ms(self) -> float:
        num_kv_tokens = sum(running.num_kv_tokens for running in self._running)
        work_ms = self._profile.step_ms(len(self._running), num_kv_tokens)
        return work_ms * max(running.slow_factor for running in self._running)
