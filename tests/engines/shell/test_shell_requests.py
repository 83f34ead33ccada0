from __future__ import annotations

import asyncio

import pytest

from epd.clock import FakeClock
from epd.engines.shell import RequestTable
from epd.errors import AbortedError


async def hold(table: RequestTable, rid: str, entered: asyncio.Event) -> None:
    async with table.scope(rid):
        entered.set()
        await asyncio.Event().wait()


async def test_an_abort_ends_every_handler_of_the_rid_with_an_aborted_error() -> None:
    table = RequestTable(FakeClock())
    events = [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.create_task(hold(table, rid, event))
        for rid, event in zip(["a", "a", "b"], events, strict=True)
    ]
    for event in events:
        await event.wait()
    assert len(table) == 2
    assert table.abort("a") == 2
    results = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert all(isinstance(result, AbortedError) for result in results)
    assert len(table) == 1
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    assert len(table) == 0


async def test_a_cancellation_by_somebody_else_stays_a_cancellation() -> None:
    table = RequestTable(FakeClock())
    entered = asyncio.Event()
    task = asyncio.create_task(hold(table, "a", entered))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(table) == 0


async def test_a_request_that_arrives_after_its_abort_is_refused_for_a_while() -> None:
    clock = FakeClock()
    table = RequestTable(clock, remember_s=10.0)
    table.abort("late")
    with pytest.raises(AbortedError):
        async with table.scope("late"):
            pass
    assert len(table) == 0
    clock.advance(11)
    async with table.scope("late"):
        assert len(table) == 1


async def test_the_memory_of_aborts_is_bounded() -> None:
    table = RequestTable(FakeClock(), remember_s=10.0)
    for number in range(10_100):
        table.abort(str(number))
    assert len(table._aborted) <= 10_001


async def test_wait_idle_returns_when_the_last_request_ends() -> None:
    table = RequestTable(FakeClock())
    entered = asyncio.Event()
    task = asyncio.create_task(hold(table, "a", entered))
    await entered.wait()
    idle = asyncio.create_task(table.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    table.abort("a")
    await asyncio.wait_for(idle, 1)
    await asyncio.gather(task, return_exceptions=True)
    assert table.num_completed == 1
