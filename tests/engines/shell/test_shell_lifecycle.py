from __future__ import annotations

import asyncio
import os
import signal

import pytest

from epd.engines.shell import Lifecycle
from epd.errors import OverloadedError
from epd.types import WorkerState


def test_only_a_ready_worker_takes_work() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(OverloadedError, match="starting"):
        lifecycle.check_accepts_work()
    lifecycle.move(WorkerState.READY)
    lifecycle.check_accepts_work()
    lifecycle.move(WorkerState.DRAINING)
    with pytest.raises(OverloadedError, match="draining") as refused:
        lifecycle.check_accepts_work()
    assert refused.value.status == 503
    assert refused.value.retryable


def test_an_illegal_transition_raises() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(ValueError, match="starting to draining"):
        lifecycle.move(WorkerState.DRAINING)


async def test_a_first_sigterm_drains_and_a_second_stops_at_once() -> None:
    lifecycle = Lifecycle()
    loop = asyncio.get_running_loop()
    lifecycle.install_signals(loop)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(lifecycle.wait_drain(), 5)
        kill = asyncio.create_task(lifecycle.wait_kill())
        await asyncio.sleep(0)
        assert not kill.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(kill, 5)
    finally:
        lifecycle.remove_signals(loop)


async def test_a_worker_whose_parent_is_gone_drains() -> None:
    lifecycle = Lifecycle()
    await lifecycle.watch_parent(77, getppid=lambda: 1)
    await asyncio.wait_for(lifecycle.wait_drain(), 1)
