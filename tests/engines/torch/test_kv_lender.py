import asyncio

import pytest
import torch

from epd.clock import FakeClock
from epd.engines.torch.kv_lender import KVLender
from epd.engines.torch.kv_pool import KVPool, KVShape
from epd.errors import OverloadedError

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32)
BLOCK = SHAPE.block_tokens


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def lender(clock: FakeClock) -> KVLender:
    buffer = torch.zeros(4 * SHAPE.block_bytes, dtype=torch.uint8)
    return KVLender(KVPool(buffer, SHAPE), clock)


async def test_blocks_are_lent_at_once_while_there_are_some(lender: KVLender):
    assert len(await lender.lend(BLOCK + 1, 1)) == 2
    assert lender.num_lent_blocks == 2


async def test_what_waits_is_counted_until_it_is_lent(lender: KVLender):
    held = await lender.lend(3 * BLOCK, 1)
    waiting = [asyncio.create_task(lender.lend(n * BLOCK, 5)) for n in (4, 1)]
    await asyncio.sleep(0)
    assert (lender.num_waiting, lender.num_waiting_tokens) == (2, 5 * BLOCK)
    lender.give_back(held)
    lender.give_back(await waiting[0])
    assert len(await waiting[1]) == 1
    assert (lender.num_waiting, lender.num_lent_blocks) == (0, 1)


async def test_no_room_in_time_is_told_by_its_tokens(lender: KVLender):
    await lender.lend(3 * BLOCK, 1)
    with pytest.raises(OverloadedError, match=f"no KV cache room for {2 * BLOCK} tokens"):
        await lender.lend(2 * BLOCK, 0.01)


async def test_quarantined_blocks_are_in_nobodys_hands_until_their_time_is_over(
    lender: KVLender, clock: FakeClock
):
    lender.quarantine(await lender.lend(4 * BLOCK, 1), for_s=60)
    assert lender.num_lent_blocks == 0
    with pytest.raises(OverloadedError):
        await lender.lend(BLOCK, 0.01)
    clock.advance(61)
    assert len(await lender.lend(4 * BLOCK, 1)) == 4
