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


async def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones(lender: KVLender):
    held = await lender.lend(3 * BLOCK, 1)
    large = asyncio.create_task(lender.lend(4 * BLOCK, 5))
    await asyncio.sleep(0)
    small = asyncio.create_task(lender.lend(BLOCK, 5))
    await asyncio.sleep(0)
    assert lender.num_waiting == 2
    assert lender.num_waiting_tokens == 5 * BLOCK
    lender.give_back(held)
    blocks = await large
    assert not small.done()
    lender.give_back(blocks)
    assert len(await small) == 1


async def test_a_wait_ends_with_its_deadline_and_lets_the_next_in(lender: KVLender):
    held = await lender.lend(3 * BLOCK, 1)
    large = asyncio.create_task(lender.lend(4 * BLOCK, 0.01))
    await asyncio.sleep(0)
    small = asyncio.create_task(lender.lend(BLOCK, 5))
    with pytest.raises(OverloadedError, match="no KV cache room"):
        await large
    assert len(await small) == 1
    lender.give_back(held)
    assert lender.num_waiting == 0


async def test_blocks_granted_to_a_cancelled_waiter_go_to_the_next(lender: KVLender):
    held = await lender.lend(4 * BLOCK, 1)
    first = asyncio.create_task(lender.lend(4 * BLOCK, 5))
    second = asyncio.create_task(lender.lend(4 * BLOCK, 5))
    await asyncio.sleep(0)
    lender.give_back(held)
    first.cancel()
    assert len(await second) == 4
    assert first.cancelled() or (await asyncio.gather(first, return_exceptions=True))
    assert lender.num_lent_blocks == 4


async def test_quarantined_blocks_are_in_nobodys_hands_until_their_time_is_over(
    lender: KVLender, clock: FakeClock
):
    lender.quarantine(await lender.lend(4 * BLOCK, 1), for_s=60)
    assert lender.num_lent_blocks == 0
    with pytest.raises(OverloadedError):
        await lender.lend(BLOCK, 0.01)
    clock.advance(61)
    assert len(await lender.lend(4 * BLOCK, 1)) == 4


async def test_a_waiter_is_served_when_a_quarantine_ends(lender: KVLender, clock: FakeClock):
    lender.quarantine(await lender.lend(4 * BLOCK, 1), for_s=0.02)
    waiting = asyncio.create_task(lender.lend(BLOCK, 5))
    await asyncio.sleep(0)
    clock.advance(0.02)
    assert len(await asyncio.wait_for(waiting, 1)) == 1
