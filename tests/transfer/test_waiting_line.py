from __future__ import annotations

import asyncio

import pytest

from epd.clock import FakeClock
from epd.transfer import WaitingLine


class Coins:
    """The simplest pool: so many equal coins."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free

    def take(self, num_coins: int) -> int | None:
        if num_coins > self.num_free:
            return None
        self.num_free -= num_coins
        return num_coins

    def put_back(self, num_coins: int) -> None:
        self.num_free += num_coins


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def coins() -> Coins:
    return Coins(4)


@pytest.fixture
def line(coins: Coins, clock: FakeClock) -> WaitingLine[int, int]:
    return WaitingLine(take=coins.take, put_back=coins.put_back, clock=clock)


async def turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_comes_while_there_is_room_does_not_wait(line: WaitingLine[int, int]) -> None:
    assert await line.take(3, timeout_s=0) == 3
    assert line.take_now(1) == 1
    assert line.take_now(1) is None


async def test_those_in_line_are_served_in_order(line: WaitingLine[int, int]) -> None:
    held = await line.take(4, 1)
    served: list[int] = []

    async def wait(number: int) -> None:
        lent = await line.take(4, 30)
        served.append(number)
        line.give_back(lent)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(wait(number))
        await turn()
        assert line.wants == [4] * 5
        line.give_back(held)
    assert served == [0, 1, 2, 3, 4]


async def test_a_large_want_at_the_head_is_not_overtaken_by_small_ones(
    line: WaitingLine[int, int],
) -> None:
    held = await line.take(3, 1)
    large = asyncio.create_task(line.take(4, 30))
    await turn()
    small = asyncio.create_task(line.take(1, 30))
    await turn()
    assert line.take_now(1) is None, "there is room, but others have waited for longer"
    assert not small.done()
    line.give_back(held)
    lent = await large
    assert not small.done()
    line.give_back(lent)
    assert await small == 1


async def test_a_wait_ends_with_its_deadline_and_lets_the_next_in(
    line: WaitingLine[int, int],
) -> None:
    await line.take(3, 1)
    large = asyncio.create_task(line.take(4, 0.01))
    await turn()
    small = asyncio.create_task(line.take(1, 30))
    with pytest.raises(TimeoutError):
        await large
    assert await small == 1
    assert not line.wants


async def test_who_is_cancelled_in_line_lets_the_next_pass(line: WaitingLine[int, int]) -> None:
    await line.take(3, 1)
    large = asyncio.create_task(line.take(4, 30))
    await turn()
    small = asyncio.create_task(line.take(1, 30))
    await turn()
    large.cancel()
    assert await small == 1
    assert not line.wants


async def test_what_is_granted_to_who_is_cancelled_goes_to_the_next(
    line: WaitingLine[int, int], coins: Coins
) -> None:
    held = await line.take(4, 1)
    first = asyncio.create_task(line.take(4, 30))
    second = asyncio.create_task(line.take(4, 30))
    await turn()
    line.give_back(held)
    first.cancel()
    assert await second == 4
    assert first.cancelled()
    line.give_back(4)
    assert coins.num_free == 4


async def test_quarantine_keeps_from_everybody_until_its_time_is_over(
    line: WaitingLine[int, int], clock: FakeClock
) -> None:
    line.quarantine(await line.take(4, 1), for_s=30)
    clock.advance(29.9)
    assert line.take_now(1) is None
    assert line.quarantined == [4]
    clock.advance(0.1)
    assert line.quarantined == []
    assert line.take_now(4) == 4


async def test_who_waits_is_woken_by_the_end_of_a_quarantine(
    line: WaitingLine[int, int], clock: FakeClock
) -> None:
    line.quarantine(await line.take(4, 1), for_s=0.02)
    waiting = asyncio.create_task(line.take(1, 30))
    await turn()
    clock.advance(0.02)
    assert await asyncio.wait_for(waiting, 5) == 1
