from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from epd.clock import SystemClock
from epd.engines.shell import (
    ComputeThread,
    Lease,
    Lifecycle,
    PeerClient,
    RequestTable,
    Shell,
    WorkerMetrics,
)
from tests.engines.shell.fake_registry import IDENTITY, TOKEN, FakeRegistry


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = FakeRegistry()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def shell(registry: FakeRegistry, session: aiohttp.ClientSession) -> AsyncIterator[Shell]:
    clock = SystemClock()
    peers = PeerClient(session, TOKEN)
    lifecycle = Lifecycle()
    compute = ComputeThread(clock)
    lease = Lease(
        IDENTITY,
        peers=peers,
        coordinator=registry.url,
        state=lambda: lifecycle.state,
        random=Random(0),
        heartbeat_s=0.05,
    )
    lifecycle.on_change(lease.notify)
    yield Shell(
        identity=IDENTITY,
        token=TOKEN,
        coordinator=registry.url,
        clock=clock,
        compute=compute,
        peers=peers,
        requests=RequestTable(clock),
        lifecycle=lifecycle,
        lease=lease,
        metrics=WorkerMetrics(CollectorRegistry()),
    )
    compute.close()
