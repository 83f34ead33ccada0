from __future__ import annotations

import asyncio

import pytest

from epd.background import keep_running, log_crash


async def test_work_that_crashes_or_ends_is_logged_and_begins_again_until_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[int] = []
    runs_well = asyncio.Event()

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) == 1:
            raise KeyError("bug")
        if len(begun) == 3:
            runs_well.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(keep_running("the expiry", work, pause_s=0))
    async with asyncio.timeout(5):
        await runs_well.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == [0, 1, 2]
    crash, end = caplog.records
    assert (crash.levelname, crash.getMessage()[:18]) == ("ERROR", "the expiry crashed")
    assert crash.exc_info is not None
    assert "the expiry ended by itself" in end.getMessage()
    assert "KeyError: 'bug'" in caplog.text


async def test_a_task_that_runs_once_is_logged_if_it_crashes_but_not_if_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def crash() -> None:
        raise KeyError("bug")

    tasks = [asyncio.create_task(crash(), name="abort"), asyncio.create_task(asyncio.sleep(9))]
    for task in tasks:
        task.add_done_callback(log_crash)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    (record,) = caplog.records
    assert record.getMessage() == "the task abort crashed"
    assert "KeyError: 'bug'" in caplog.text
