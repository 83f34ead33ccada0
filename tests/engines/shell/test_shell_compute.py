from __future__ import annotations

import asyncio
import threading

import pytest

from epd.clock import FakeClock
from epd.engines.shell import ComputeThread


async def test_jobs_run_one_at_a_time_in_order_in_one_thread() -> None:
    compute = ComputeThread(FakeClock())
    seen: list[tuple[int, int]] = []

    def job(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return number

    results = await asyncio.gather(*(compute.run(job, n) for n in range(5)))
    assert results == [0, 1, 2, 3, 4]
    assert [n for n, _ in seen] == results
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    compute.close()


async def test_cancelling_a_running_job_returns_only_when_it_has_ended() -> None:
    compute = ComputeThread(FakeClock())
    began, release = threading.Event(), threading.Event()
    ended = False

    def job() -> None:
        nonlocal ended
        began.set()
        release.wait(5)
        ended = True

    task = asyncio.create_task(compute.run(job))
    await asyncio.to_thread(began.wait, 5)
    task.cancel()
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    compute.close()


async def test_cancelling_a_waiting_job_drops_it() -> None:
    compute = ComputeThread(FakeClock())
    began, release = threading.Event(), threading.Event()
    ran: list[str] = []

    def block() -> None:
        began.set()
        release.wait(5)

    first = asyncio.create_task(compute.run(block))
    await asyncio.to_thread(began.wait, 5)
    second = asyncio.create_task(compute.run(ran.append, "second"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    assert ran == []
    compute.close()


async def test_busy_s_tells_how_long_the_running_job_takes() -> None:
    clock = FakeClock()
    compute = ComputeThread(clock)
    began, release = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        release.wait(5)

    assert compute.busy_s() == 0
    task = asyncio.create_task(compute.run(block))
    await asyncio.to_thread(began.wait, 5)
    clock.advance(7)
    assert compute.busy_s() == 7
    release.set()
    await task
    assert compute.busy_s() == 0
    compute.close()


async def test_an_error_in_a_job_reaches_the_caller() -> None:
    compute = ComputeThread(FakeClock())

    def job() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await compute.run(job)
    compute.close()
