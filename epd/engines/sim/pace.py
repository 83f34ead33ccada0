"""Simulated time: how long a piece of work of the profile takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from epd.clock import Clock

Sleep = Callable[[float], Awaitable[object]]


class Pace:
    """Turns milliseconds of a profile into waiting.

    Args:
        clock: measures what has passed.
        sleep: waits for seconds of that clock.
        time_scale: seconds that a second of the profile takes.
        jitter_ratio: each time varies by up to this part of it.
        random: of the jitter.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        sleep: Sleep = asyncio.sleep,
        time_scale: float = 1.0,
        jitter_ratio: float = 0.0,
        random: Random,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._time_scale = time_scale
        self._jitter_ratio = jitter_ratio
        self._random = random

    def seconds(self, work_ms: float) -> float:
        """How long `work_ms` takes this time."""
        jitter = self._random.uniform(-self._jitter_ratio, self._jitter_ratio)
        return work_ms / 1000 * self._time_scale * (1 + jitter)

    async def wait(self, seconds: float) -> None:
        await self._sleep(seconds)

    async def reach(self, moment_s: float) -> None:
        """Wait until the clock says `moment_s`; only let others run if that has passed."""
        await self._sleep(max(0.0, moment_s - self._clock.monotonic()))
