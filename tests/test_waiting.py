from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from epd.waiting import unless


class Work:
    """Counts what becomes of the coroutines it gives."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_cancelled = 0

    async def forever(self) -> None:
        self.num_running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            await asyncio.sleep(0)  # it takes a moment to end
            raise
        finally:
            self.num_running -= 1

    async def give(self, result: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def work() -> Work:
    return Work()


async def test_the_result_of_the_work_if_nothing_stops_it(work: Work) -> None:
    assert await unless(work.forever(), work.give(7)) == 7
    assert (work.num_running, work.num_cancelled) == (0, 1)


async def test_none_once_stopped_and_the_work_has_ended(work: Work) -> None:
    assert await unless(work.give("stop"), work.forever()) is None
    assert (work.num_running, work.num_cancelled) == (0, 1)


async def test_work_that_is_done_counts_although_the_stop_has_come_too(work: Work) -> None:
    stop = asyncio.Event()
    stop.set()
    assert await unless(stop.wait(), work.give(7)) == 7


@pytest.mark.parametrize("fails", ["work", "stop"])
async def test_the_first_failure_of_either_is_raised(work: Work, fails: str) -> None:
    error = ValueError("no")
    pair: list[Awaitable[Any]] = [work.give(error), work.forever()]
    stop, job = pair if fails == "stop" else reversed(pair)
    with pytest.raises(ValueError, match="no"):
        await unless(stop, job)
    assert work.num_running == 0


async def test_a_caller_that_is_cancelled_leaves_neither_running(work: Work) -> None:
    waiting = asyncio.create_task(unless(work.forever(), work.forever()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.num_running == 2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (work.num_running, work.num_cancelled) == (0, 2)


async def test_a_task_that_is_only_waited_for_goes_on(work: Work) -> None:
    task = asyncio.create_task(work.forever())
    assert await unless(work.give("stop"), asyncio.wait([task])) is None
    assert work.num_running == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_errors_of_what_was_given_up_are_never_reported_as_unseen(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("late") from None

    stop = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(stop.set_result, None)
    assert await unless(stop, fail_when_cancelled()) is None
    assert "never retrieved" not in caplog.text
