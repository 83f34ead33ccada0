"""KV memory that is only counted: who waits for it, what is shared, what leaves first."""

from __future__ import annotations

import asyncio

import pytest

from epd.clock import FakeClock
from epd.engines.sim.kv_cache import KVCache
from epd.errors import OverloadedError

A, B, C, D = (bytes([number]) for number in range(4))


def cache(num_blocks: int) -> KVCache:
    return KVCache(num_blocks * 16, 16, FakeClock())


async def computed(kv: KVCache, *hashes: bytes) -> None:
    """A request whose prompt is these full blocks comes and goes."""
    hold = await kv.hold(len(hashes) * 16, hashes, timeout_s=1)
    kv.publish(hold, hashes)
    kv.release(hold)


async def test_a_known_beginning_is_shared_and_counted_once() -> None:
    kv = cache(4)
    first = await kv.hold(40, (A, B), timeout_s=1)
    kv.publish(first, (A, B))
    second = await kv.hold(40, (A, B), timeout_s=1)
    assert (first.num_hit, second.num_hit) == (0, 2)
    assert kv.num_held_blocks == 4, "two shared blocks and an end of its own for each"
    kv.release(first)
    kv.release(second)
    assert (kv.num_held_blocks, kv.num_cached_blocks) == (0, 2)


async def test_a_prompt_computed_twice_at_once_is_kept_once() -> None:
    kv = cache(4)
    holds = [await kv.hold(32, (A, B), timeout_s=1) for _ in range(2)]
    assert kv.num_held_blocks == 4
    for hold in holds:
        kv.publish(hold, (A, B))
    assert kv.num_held_blocks == 2
    for hold in holds:
        kv.release(hold)
    assert (kv.num_held_blocks, kv.num_cached_blocks) == (0, 2)


async def test_what_was_used_least_recently_leaves_and_ends_leave_before_beginnings() -> None:
    kv = cache(3)
    await computed(kv, A, B)
    await computed(kv, C)
    await computed(kv, D)  # in place of B
    assert (await kv.hold(32, (A, B), timeout_s=1)).num_hit == 1


async def test_one_who_finds_no_room_waits_in_line_until_there_is_some() -> None:
    kv = cache(2)
    hold = await kv.hold(32, (), timeout_s=1)
    waiting = asyncio.create_task(kv.hold(16, (), timeout_s=5))
    await asyncio.sleep(0)
    assert kv.num_waiting_tokens == 16
    kv.release(hold)
    kv.release(await waiting)
    assert (kv.num_waiting_tokens, kv.num_held_blocks) == (0, 0)


async def test_waiting_for_room_ends() -> None:
    kv = cache(1)
    await kv.hold(16, (), timeout_s=1)
    with pytest.raises(OverloadedError, match="no KV cache room for 5 tokens"):
        await kv.hold(5, (), timeout_s=0.01)
    assert kv.num_waiting_tokens == 0
