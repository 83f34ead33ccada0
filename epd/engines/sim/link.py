"""A simulated worker's link to others: no byte moves, but it takes the time of the bytes."""

from __future__ import annotations

import asyncio

from epd.engines.sim.pace import Pace
from epd.engines.sim.profile import TransferProfile

_MIB = 2**20


class Link:
    """Sends one hand-off after another."""

    def __init__(self, profile: TransferProfile, pace: Pace) -> None:
        self._profile = profile
        self._pace = pace
        self._turn = asyncio.Lock()

    async def send(self, nbytes: int, slow_factor: float = 1.0) -> None:
        """Wait until `nbytes` have arrived. Safe to cancel."""
        work_ms = self._profile.latency_ms + self._profile.ms_per_mib * nbytes / _MIB
        async with self._turn:
            await self._pace.wait(self._pace.seconds(work_ms * slow_factor))
