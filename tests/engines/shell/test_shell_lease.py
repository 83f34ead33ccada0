from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random

import aiohttp
import pytest

from epd.auth import ClusterToken
from epd.engines.shell import Lease, PeerClient, Shell
from epd.types import WorkerState
from epd.wire import Span
from tests.engines.shell.fake_registry import IDENTITY, TOKEN, FakeRegistry


@contextlib.asynccontextmanager
async def running(lease: Lease) -> AsyncIterator[None]:
    task = asyncio.create_task(lease.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def span(name: str = "decode", rid: str = "r") -> Span:
    return Span.model_validate(
        {"request_id": rid, "name": name, "start_unix_s": 1.0, "duration_s": 0.5}
    )


async def test_heartbeats_carry_identity_and_state_and_bring_back_the_encoder_paths(
    registry: FakeRegistry, shell: Shell
) -> None:
    async with running(shell.lease):
        first = await registry.wait_for(lambda report: True)
        shell.lifecycle.move(WorkerState.READY)
        await registry.wait_for(lambda report: report.state is WorkerState.READY)
    assert (first.worker_id, first.epoch, first.state) == ("w1", 1, WorkerState.STARTING)
    assert shell.lease.grant is not None
    assert shell.lease.grant.encoder_paths == ["/enc/0"]


async def test_spans_recorded_together_travel_in_one_report_before_the_next_heartbeat(
    session: aiohttp.ClientSession,
) -> None:
    registry = FakeRegistry(heartbeat_s=60.0)
    await registry.start()
    lease = Lease(
        IDENTITY,
        peers=PeerClient(session, ClusterToken("a-token-for-tests-only")),
        coordinator=registry.url,
        state=lambda: WorkerState.READY,
        random=Random(0),
        heartbeat_s=60.0,
    )
    async with running(lease):
        await registry.wait_for(lambda report: True)
        lease.record(span("prefill"))
        lease.record(span("decode"))
        report = await registry.wait_for(lambda report: report.spans)
    assert [s.name for s in report.spans] == ["prefill", "decode"]
    await registry.stop()


async def test_a_restarted_coordinator_learns_the_worker_and_its_kept_spans(
    registry: FakeRegistry, shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await shell.lease.send()
    await registry.stop()
    shell.lease.record(span(rid="kept"))
    await shell.lease.send()
    await shell.lease.send()
    registry.reports.clear()
    await registry.start()
    async with running(shell.lease):
        report = await registry.wait_for(lambda report: report.spans)
        await registry.wait_for(lambda report: report is not registry.reports[0])
    assert [s.request_id for s in report.spans] == ["kept"]
    assert caplog.text.count("no lease") == 1
    assert caplog.text.count("the coordinator is back") == 1


async def test_kept_spans_are_bounded_and_the_oldest_go_first(shell: Shell) -> None:
    for number in range(2000):
        shell.lease.record(span(rid=str(number)))
    assert len(shell.lease._spans) == 1024
    assert shell.lease._spans[-1].request_id == "1999"


async def test_a_wrong_token_is_told_clearly_once_and_retried(
    session: aiohttp.ClientSession, registry: FakeRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    lease = Lease(
        IDENTITY,
        peers=PeerClient(session, ClusterToken("another-token-entirely")),
        coordinator=registry.url,
        state=lambda: WorkerState.READY,
        random=Random(0),
    )
    await lease.send()
    await lease.send()
    assert caplog.text.count("refused this worker's cluster token") == 1
    assert lease.grant is None


async def test_goodbye_reports_the_last_state(registry: FakeRegistry, shell: Shell) -> None:
    shell.lifecycle.move(WorkerState.READY)
    shell.lifecycle.move(WorkerState.DRAINING)
    shell.lifecycle.move(WorkerState.GONE)
    await shell.lease.say_goodbye()
    assert registry.reports[-1].state is WorkerState.GONE


async def test_labels_are_reported(session: aiohttp.ClientSession, registry: FakeRegistry) -> None:
    lease = Lease(
        replace(IDENTITY, labels={"zone": "a"}),
        peers=PeerClient(session, TOKEN),
        coordinator=registry.url,
        state=lambda: WorkerState.READY,
        random=Random(0),
    )
    await lease.send()
    assert registry.reports[-1].labels == {"zone": "a"}
