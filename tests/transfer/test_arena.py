from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.clock import FakeClock
from epd.errors import OverloadedError
from epd.transfer import Arena, Region

CAPACITY = 4_096
UNIT = 64


def new_arena(clock: FakeClock | None = None) -> Arena:
    return Arena(1 << 20, CAPACITY, alignment=UNIT, clock=clock or FakeClock())


def held(arena: Arena, nbytes: int) -> Region:
    region = arena.try_allocate(nbytes, "test")
    assert region is not None
    return region


async def turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of allocations, releases and quarantines keeps the books right."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.arena = new_arena(self.clock)
        self.regions: list[Region] = []
        self.resting: list[tuple[float, Region]] = []
        self.generations: set[int] = set()

    @rule(nbytes=st.integers(1, CAPACITY // 3))
    def allocate(self, nbytes: int) -> None:
        largest = self.arena.stats().largest_free_bytes
        region = self.arena.try_allocate(nbytes, "test")
        assert (region is not None) == (nbytes <= largest)
        if region is not None:
            assert region.generation not in self.generations
            assert self.arena.address_of(region) % UNIT == 0
            self.generations.add(region.generation)
            self.regions.append(region)

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        region = data.draw(st.sampled_from(self.regions))
        self.regions.remove(region)
        self.arena.release(region)
        with pytest.raises(ValueError, match="not held"):
            self.arena.release(region)

    @precondition(lambda self: self.regions)
    @rule(data=st.data(), for_s=st.integers(1, 10))
    def quarantine(self, data: st.DataObject, for_s: int) -> None:
        region = data.draw(st.sampled_from(self.regions))
        self.regions.remove(region)
        self.resting.append((self.clock.monotonic() + for_s, region))
        self.arena.quarantine(region, for_s)
        assert self.arena.find(region.generation) is None

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(seconds)
        now = self.clock.monotonic()
        self.resting = [entry for entry in self.resting if entry[0] > now]

    @invariant()
    def bytes_are_conserved(self) -> None:
        stats = self.arena.stats()
        assert stats.used_bytes + stats.quarantined_bytes + stats.free_bytes == CAPACITY
        assert stats.used_bytes == sum(-(-r.nbytes // UNIT) * UNIT for r in self.regions)
        assert stats.num_regions == len(self.regions)
        assert stats.num_quarantined == len(self.resting)
        assert stats.peak_used_bytes >= stats.used_bytes

    @invariant()
    def nothing_overlaps_and_free_space_is_joined(self) -> None:
        taken = sorted(
            (region.offset, region.offset + -(-region.nbytes // UNIT) * UNIT)
            for region in [*self.regions, *(region for _, region in self.resting)]
        )
        edges = [(0, 0), *taken, (CAPACITY, CAPACITY)]
        gaps = [start - end for (_, end), (start, _) in itertools.pairwise(edges)]
        assert min(gaps) >= 0
        assert self.arena.stats().largest_free_bytes == max(gaps)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_region_addresses_are_aligned_in_memory_that_is_not() -> None:
    arena = Arena(1_000_001, 1_000, alignment=256)
    region = held(arena, 1)
    assert arena.address_of(region) % 256 == 0
    assert arena.address_of(region) >= 1_000_001
    assert arena.address_of(region) + arena.capacity_bytes <= 1_001_001


def test_the_smallest_gap_that_fits_is_taken() -> None:
    arena = new_arena()
    big, _, small, _ = (held(arena, n) for n in (640, 64, 128, 64))
    arena.release(big)
    arena.release(small)
    assert held(arena, 100).offset == small.offset


def test_a_stale_generation_finds_nothing() -> None:
    arena = new_arena()
    first = held(arena, 100)
    assert arena.find(first.generation) == first
    arena.release(first)
    second = held(arena, 100)
    assert second.offset == first.offset
    assert arena.find(first.generation) is None


async def test_more_than_the_whole_arena_is_no_overload() -> None:
    with pytest.raises(ValueError, match="4097 bytes in an arena of 4096"):
        await new_arena().allocate(CAPACITY + 1, "test", timeout_s=3_600)


async def test_waiting_ends_with_an_overload_after_the_timeout() -> None:
    arena = new_arena()
    held(arena, CAPACITY)
    with pytest.raises(OverloadedError, match="no 1 bytes"):
        await arena.allocate(1, "test", timeout_s=0.01)
    assert arena.stats().num_waiters == 0


async def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    arena = new_arena()
    halves = [held(arena, CAPACITY // 2) for _ in range(2)]
    large = asyncio.create_task(arena.allocate(CAPACITY, "large", timeout_s=30))
    await turn()
    small = asyncio.create_task(arena.allocate(UNIT, "small", timeout_s=30))
    await turn()
    arena.release(halves[0])
    await turn()
    assert arena.try_allocate(UNIT, "jumper") is None
    assert not large.done() and not small.done()
    arena.release(halves[1])
    region = await large
    assert not small.done()
    arena.release(region)
    assert (await small).owner == "small"


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_leaks_nothing() -> None:
    arena = new_arena()
    whole = held(arena, CAPACITY)
    waiting = asyncio.create_task(arena.allocate(CAPACITY, "test", timeout_s=30))
    await turn()
    arena.release(whole)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert arena.stats().free_bytes == CAPACITY


async def test_quarantined_bytes_are_free_only_when_their_time_is_over() -> None:
    clock = FakeClock()
    arena = new_arena(clock)
    region = held(arena, CAPACITY)
    arena.quarantine(region, 30)
    clock.advance(29.9)
    assert arena.try_allocate(UNIT, "test") is None
    with pytest.raises(ValueError, match="not held"):
        arena.release(region)
    clock.advance(0.1)
    assert arena.try_allocate(UNIT, "test") is not None


async def test_a_waiter_wakes_up_when_a_quarantine_ends() -> None:
    arena = Arena(1 << 20, CAPACITY, alignment=UNIT)
    arena.quarantine(held(arena, CAPACITY), 0.05)
    region = await arena.allocate(CAPACITY, "test", timeout_s=30)
    assert region.nbytes == CAPACITY
