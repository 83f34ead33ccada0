from __future__ import annotations

import asyncio
import time

import pytest

from epd.clock import FakeClock
from epd.simulator.loop import StalledError, run_simulated


def test_a_day_passes_at_once_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def main(clock: FakeClock) -> str:
        async def note(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append((name, clock.monotonic()))

        await asyncio.gather(note("night", 86_400), note("morning", 0.25), note("noon", 3600))
        assert asyncio.get_running_loop().time() == clock.monotonic()
        return "done"

    began_s = time.perf_counter()
    assert run_simulated(main) == "done"
    assert time.perf_counter() - began_s < 60
    assert seen == [("morning", 0.25), ("noon", 3600), ("night", 86_400)]


def test_computing_takes_no_simulated_time() -> None:
    async def main(clock: FakeClock) -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return clock.monotonic()

    assert run_simulated(main) == 0


def test_a_timeout_strikes_at_its_simulated_moment() -> None:
    async def main(clock: FakeClock) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return clock.monotonic()

    assert run_simulated(main) == pytest.approx(7)


def test_a_wait_that_nothing_can_end_is_an_error_and_no_hang() -> None:
    async def main(_: FakeClock) -> None:
        await asyncio.sleep(1)
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="not over"):
        run_simulated(main)
