"""Leases while the coordinator's own loop stands still, and tasks of it that crash."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from epd.api.server import expire_leases
from epd.clock import SystemClock
from epd.coordinator.fleet import ServerWatch
from epd.pools.registry import Registry
from epd.types import Stage, WorkerState
from epd.wire import ModelCard, WorkerReport
from tests.fakes.deployment import deployed

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


async def test_leases_still_lapse_after_the_expiry_has_crashed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expire, crashes = Registry.expire, iter([KeyError("bug")])

    def crash_once(registry: Registry) -> None:
        for crash in crashes:
            raise crash
        expire(registry)

    async with deployed(lease={"heartbeat_s": LEASE_S / 4, "lease_s": LEASE_S}) as d:
        monkeypatch.setattr(Registry, "expire", crash_once)
        workers = d.coordinator.registry.all()
        async with asyncio.timeout(10):
            for worker in workers:
                await worker.lost.wait()
    assert "the expiry of leases crashed" in caplog.text
    assert "KeyError: 'bug'" in caplog.text, "with its traceback"


async def test_an_existing_server_is_watched_again_after_its_watch_has_crashed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, looked_again = [KeyError("bug")], asyncio.Event()

    async def look(_: ServerWatch) -> None:
        if looks:
            raise looks.pop()
        looked_again.set()

    monkeypatch.setattr(ServerWatch, "look", look)
    server = {"url": "http://[::1]:9", "stage": "encode", "model": "tiny-vl"}
    async with deployed(fleet=[server]):
        async with asyncio.timeout(10):
            await looked_again.wait()
    assert "the watch of http://[::1]:9 crashed" in caplog.text
    assert "KeyError: 'bug'" in caplog.text
