"""Leases while the coordinator's own loop stands still."""

from __future__ import annotations

import asyncio
import contextlib
import time

from epd.api.server import expire_leases
from epd.clock import SystemClock
from epd.pools.registry import Registry
from epd.types import Stage, WorkerState
from epd.wire import ModelCard, WorkerReport

LEASE_S, HEARTBEAT_S = 0.4, 0.1


async def test_a_stall_of_the_coordinator_loses_no_worker_but_silence_does() -> None:
    registry = Registry(clock := SystemClock(), lease_s=LEASE_S)
    registry.report(
        WorkerReport(
            worker_id="d",
            epoch=1,
            stage=Stage.DECODE,
            engine="fake",
            state=WorkerState.READY,
            url="http://127.0.0.1:1",
            model=ModelCard(model_id="m", model_type="t", context_tokens=1),
        )
    )
    (worker,) = registry.all()
    expiry = asyncio.create_task(expire_leases(registry, clock, HEARTBEAT_S))
    try:
        await asyncio.sleep(0)
        time.sleep(2 * LEASE_S)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(HEARTBEAT_S / 4)
        assert not worker.lost.is_set()
        async with asyncio.timeout(10):
            await worker.lost.wait()
    finally:
        expiry.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await expiry
