"""Where embeddings land, and when that memory may be used again."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from encoders import ImageGrid
from epd.clock import FakeClock
from epd.engines.shell.metrics import WorkerMetrics
from epd.engines.torch.embedding_intake import EmbeddingIntake, EncodedImage
from epd.errors import EPDError, UnreachableError, WorkerError
from epd.transfer import Arena
from epd.wire import SendRequest, SendResponse

HIDDEN = 8
NUM_TOKENS = 4
NBYTES = NUM_TOKENS * HIDDEN * 4


class Gateway:
    """Answers `/send` as told."""

    def __init__(
        self, *, is_replayed: bool = False, failures: Mapping[int, EPDError] | None = None
    ) -> None:
        self.is_replayed = is_replayed
        self.failures = failures or {}
        self.requests: list[SendRequest] = []

    async def call(self, *_: Any, message: SendRequest, **__: Any) -> SendResponse:
        self.requests.append(message)
        failure = self.failures.get(message.part_idx)
        if failure is not None:
            raise failure
        return SendResponse(nbytes=NBYTES, is_replayed=self.is_replayed)


def new_intake(gateway: Gateway) -> EmbeddingIntake:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    arena = Arena(buffer.data_ptr(), buffer.numel(), clock=FakeClock())
    shell: Any = SimpleNamespace(peers=gateway, metrics=WorkerMetrics(CollectorRegistry()))
    transfer: Any = SimpleNamespace(session_id="host:1")
    return EmbeddingIntake(
        shell,
        arena=arena,
        buffer=buffer,
        transfer=transfer,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        fingerprint="",
        timeout_s=1.0,
    )


def image(part_idx: int) -> EncodedImage:
    req_id = f"r_local_part_{part_idx}"
    return EncodedImage(req_id, part_idx, "http://slot", ImageGrid(1, 4, 4), NUM_TOKENS, NBYTES)


@pytest.mark.parametrize("is_replayed", [False, True])
async def test_memory_that_an_earlier_write_may_still_reach_is_kept_from_others(
    is_replayed: bool,
) -> None:
    gateway = Gateway(is_replayed=is_replayed)
    intake = new_intake(gateway)
    async with intake.landed("r", [image(0)]) as embeddings:
        assert embeddings.shape == (NUM_TOKENS, HIDDEN)
        assert intake.arena.stats().used_bytes > 0
    assert gateway.requests[0].accepts_replay
    stats = intake.arena.stats()
    assert (stats.used_bytes, stats.quarantined_bytes > 0) == (0, is_replayed)


@pytest.mark.parametrize(
    ("failures", "rests"),
    [
        ({0: WorkerError("it broke the connection")}, True),
        ({0: UnreachableError("nobody there"), 1: UnreachableError("nobody there")}, False),
        ({1: UnreachableError("nobody there")}, True),
    ],
    ids=["told", "nobody told", "one told"],
)
async def test_memory_rests_after_a_failure_only_if_somebody_was_told_to_write_there(
    failures: dict[int, EPDError], rests: bool
) -> None:
    intake = new_intake(Gateway(failures=failures))
    with pytest.raises(WorkerError):
        async with intake.landed("r", [image(0), image(1)]):
            pass
    stats = intake.arena.stats()
    assert (stats.used_bytes, stats.quarantined_bytes > 0) == (0, rests)
