"""Which of several failures that come in the same moment a request reports."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from epd.clock import FakeClock
from epd.config import RequestConfig
from epd.coordinator.client import WorkerClient
from epd.coordinator.dispatch import Dispatch, Pair
from epd.coordinator.lifecycle import RequestRecord
from epd.errors import (
    AbortedError,
    BadRequestError,
    EPDError,
    MediaError,
    OverloadedError,
    WorkerError,
)
from epd.pools.registry import Worker
from epd.types import RequestId, Stage, WorkerState
from epd.wire import ModelCard, WorkerReport


def worker(stage: Stage) -> Worker:
    model = ModelCard(model_id="m", model_type="t", context_tokens=1)
    report = WorkerReport(
        worker_id=stage,
        epoch=1,
        stage=stage,
        engine="fake",
        state=WorkerState.READY,
        url="http://127.0.0.1:1",
        model=model,
    )
    return Worker(report, now_s=0.0)


class FailingClient:
    """Fails both calls in one step of the event loop, once both are waiting."""

    def __init__(self, errors: dict[Stage, BaseException]) -> None:
        self._errors = errors
        self._both = asyncio.Barrier(2)
        self.arrived = asyncio.Event()

    async def open(self, worker: Worker, path: str, body: bytes) -> Any:
        async with self._both:
            self.arrived.set()
        raise self._errors[worker.stage]


class NoSink:
    has_started = False

    async def start(self, content_type: str) -> None:
        raise AssertionError("nothing may be sent")

    async def write(self, chunk: bytes) -> None:
        raise AssertionError("nothing may be sent")

    async def finish(self) -> None:
        raise AssertionError("nothing may be sent")


async def run(prefill: BaseException, decode: BaseException) -> None:
    client = FailingClient({Stage.PREFILL: prefill, Stage.DECODE: decode})
    dispatch = Dispatch(
        cast(WorkerClient, client),
        FakeClock(),
        RequestConfig(),
        RequestRecord(RequestId("r"), created_unix_s=0, created_s=1000),
        Pair(worker(Stage.PREFILL), worker(Stage.DECODE)),
        None,
        is_stream=True,
        is_encoding=lambda: False,
        has_others=lambda worker: True,
        on_hand_over=lambda: None,
        hang_s=20.0,
    )
    await dispatch.run(b"{}", NoSink())


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("told", "consequence"),
    [
        (MediaError("the image is cut off"), WorkerError("prefill failed")),
        (BadRequestError("too long"), OverloadedError("busy")),
        (WorkerError("out of memory"), AbortedError("aborted")),
        (BadRequestError("too long"), AbortedError("aborted")),
    ],
)
async def test_the_cause_is_told_and_not_its_consequence(
    told: EPDError, consequence: EPDError, swapped: bool
) -> None:
    pair = (consequence, told) if swapped else (told, consequence)
    with pytest.raises(type(told)) as caught:
        await run(*pair)
    assert caught.value is told


async def test_a_bug_is_not_hidden_by_an_error_that_comes_with_it() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run(WorkerError("vanished"), KeyError("bug"))
    assert caught.group_contains(KeyError)


async def test_a_client_that_leaves_while_both_fail_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    running = asyncio.create_task(run(WorkerError("a"), WorkerError("b")))
    for _ in range(3):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises((asyncio.CancelledError, WorkerError)):
        await running
    assert asyncio.all_tasks() == before
