"""Injected time, so that leases, deadlines and caches are tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, from two sources that must not be mixed."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; for durations and deadlines."""
        ...

    def time(self) -> float:
        """Seconds since the Unix epoch; for timestamps that other machines read."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


class FakeClock:
    """A clock that moves only when told to; both sources advance together."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("time only moves forward")
        self._now_s += seconds
