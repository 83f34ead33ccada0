from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from epd.own_thread import in_own_thread


async def test_the_result_and_the_error_of_the_call_reach_who_waits() -> None:
    assert await in_own_thread(threading.get_ident, name="t") != threading.get_ident()
    with pytest.raises(KeyError):
        await in_own_thread(lambda: {}["missing"], name="t")


async def test_who_waits_may_leave_before_the_call_ends() -> None:
    release = threading.Event()
    future = in_own_thread(lambda: release.wait(5), name="t")
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future
    release.set()
    await asyncio.sleep(0.01)  # what comes too late is dropped without a word


def test_a_call_that_does_not_end_keeps_no_process_from_ending() -> None:
    code = """
import asyncio, time
from epd.own_thread import in_own_thread
async def main():
    in_own_thread(lambda: time.sleep(60), name="t")
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
