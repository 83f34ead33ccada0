"""Simulated time: an asyncio event loop that jumps to the next timer instead of waiting for it.

Whatever is written for asyncio and takes its time from timers runs on it unchanged, in an order
that only its own steps decide. There is no I/O and no other thread: the timers are all there is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from epd.clock import FakeClock

T = TypeVar("T")


class StalledError(RuntimeError):
    """Everybody waits for somebody else, so time has nowhere to go: a deadlock."""


class _Jump(selectors.SelectSelector):
    """Where a loop waits for I/O, at most until its next timer: here that passes at once."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("nothing is left that could happen, and the simulation is not over")
        self._clock.advance(max(0.0, timeout))
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time, which begins at 0.

    Attributes:
        clock: the same time, for code that is given a `Clock`.
    """

    def __init__(self) -> None:
        self.clock = FakeClock(start_s=0.0)
        super().__init__(_Jump(self.clock))

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self.clock.monotonic()


def run_simulated(main: Callable[[FakeClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end in simulated time and return its result.

    Raises:
        StalledError: it waits for something that cannot happen.
    """
    loop = SimulatedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop.clock))
