"""Whose blocks may be used again after a hand-off of KV that failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd.clock import FakeClock
from epd.engines.torch.kv_intake import KVIntake
from epd.engines.torch.kv_lender import KVLender
from epd.engines.torch.kv_pool import KVPool, KVShape
from epd.errors import DeadlineError, EPDError, UnreachableError, WorkerError
from epd.transfer import QUARANTINE_S
from epd.wire import ChatRequest, KVLayout, RoomDescriptor

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32)
LAYOUT = KVLayout(
    num_layers=1,
    block_tokens=SHAPE.block_tokens,
    num_kv_heads=1,
    head_dim=2,
    dtype="float32",
    model_fingerprint="f",
)
DESCRIPTOR = RoomDescriptor(
    room=1,
    generation=1,
    num_prompt_tokens=3,
    next_position=3,
    first_token_id=1,
    seed=0,
    num_blocks=1,
    layout=LAYOUT,
)
CHAT = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": 1,
    }
)


class Peers:
    def __init__(self, failure: EPDError) -> None:
        self._failure = failure

    async def call(self, *_: Any, **__: Any) -> Any:
        raise self._failure


@pytest.mark.parametrize(
    ("failure", "num_resting"),
    [
        (UnreachableError("the prefill worker cannot be reached"), 0),
        (WorkerError("the prefill worker broke the connection"), 1),
        (DeadlineError("the prefill worker did not answer"), 1),
    ],
)
async def test_blocks_rest_after_a_failure_only_if_prefill_was_told_to_write_there(
    failure: EPDError, num_resting: int
) -> None:
    clock = FakeClock()
    buffer = torch.zeros(4 * SHAPE.block_bytes, dtype=torch.uint8)
    lender = KVLender(KVPool(buffer, SHAPE), clock)
    peers: Any = Peers(failure)
    transfer: Any = SimpleNamespace(session_id="host:1")
    metrics: Any = None
    intake = KVIntake(
        peers=peers,
        lender=lender,
        transfer=transfer,
        layout=LAYOUT,
        metrics=metrics,
        timeout_s=1,
    )
    with pytest.raises(type(failure)):
        await intake.take(CHAT, DESCRIPTOR, 2 * SHAPE.block_tokens)
    assert lender.num_lent_blocks == 0
    assert lender.pool.num_free_blocks == 4 - num_resting
    clock.advance(QUARANTINE_S)
    assert lender.num_lent_blocks == 0
    assert lender.pool.num_free_blocks == 4
