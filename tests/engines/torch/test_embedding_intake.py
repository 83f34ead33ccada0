"""Where embeddings land, and when that memory may be used again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from encoders import ImageGrid
from epd.clock import FakeClock
from epd.engines.shell.metrics import WorkerMetrics
from epd.engines.torch.embedding_intake import EmbeddingIntake, EncodedImage
from epd.transfer import Arena
from epd.wire import SendRequest, SendResponse

HIDDEN = 8
NUM_TOKENS = 4
NBYTES = NUM_TOKENS * HIDDEN * 4


class Gateway:
    """Answers `/send` as told."""

    def __init__(self, *, is_replayed: bool) -> None:
        self.is_replayed = is_replayed
        self.requests: list[SendRequest] = []

    async def call(self, *_: Any, message: SendRequest, **__: Any) -> SendResponse:
        self.requests.append(message)
        return SendResponse(nbytes=NBYTES, is_replayed=self.is_replayed)


@pytest.mark.parametrize("is_replayed", [False, True])
async def test_memory_that_an_earlier_write_may_still_reach_is_kept_from_others(
    is_replayed: bool,
) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    arena = Arena(buffer.data_ptr(), buffer.numel(), clock=FakeClock())
    gateway = Gateway(is_replayed=is_replayed)
    shell: Any = SimpleNamespace(peers=gateway, metrics=WorkerMetrics(CollectorRegistry()))
    transfer: Any = SimpleNamespace(session_id="host:1")
    intake = EmbeddingIntake(
        shell,
        arena=arena,
        buffer=buffer,
        transfer=transfer,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        fingerprint="",
        timeout_s=1.0,
    )
    image = EncodedImage("r_local_part_0", 0, "http://slot", ImageGrid(1, 4, 4), NUM_TOKENS, NBYTES)
    async with intake.landed("r", [image]) as embeddings:
        assert embeddings.shape == (NUM_TOKENS, HIDDEN)
        assert arena.stats().used_bytes > 0
    assert gateway.requests[0].accepts_replay
    stats = arena.stats()
    assert (stats.used_bytes, stats.quarantined_bytes > 0) == (0, is_replayed)
