import asyncio

import pytest

from epd.errors import AbortedError
from epd.media.single_flight import SingleFlight


class Call:
    """A call that waits to be let go, and remembers how it ended."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.num_started


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_equal_keys_share_one_call_and_others_do_not() -> None:
    flights, call = SingleFlight[int](), Call()
    waiters = [asyncio.create_task(flights.run(key, call)) for key in "aab"]
    await settle()
    assert (call.num_started, flights.num_running) == (2, 2)
    call.go.set()
    assert await asyncio.gather(*waiters) == [2, 2, 2]
    assert flights.num_running == 0
    assert await flights.run("a", call) == 3


async def test_a_waiter_that_leaves_does_not_stop_the_others() -> None:
    flights, call = SingleFlight[int](), Call()
    first, second = (asyncio.create_task(flights.run("a", call)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled() and call.num_cancelled == 0
    call.go.set()
    assert await second == 1


async def test_the_call_stops_when_the_last_waiter_leaves_and_a_newcomer_starts_afresh() -> None:
    flights, call = SingleFlight[int](), Call()
    waiters = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    for waiter in waiters:
        waiter.cancel()
    await asyncio.sleep(0)  # the waiters leave; the call itself has not ended yet
    newcomer = asyncio.create_task(flights.run("a", call))
    await settle()
    assert (call.num_cancelled, call.num_started, flights.num_running) == (1, 2, 1)
    call.go.set()
    assert await newcomer == 2


async def test_an_error_reaches_every_waiter_and_is_not_kept() -> None:
    flights, call = SingleFlight[int](), Call()
    call.error = ValueError("broken")
    call.go.set()
    results = await asyncio.gather(
        *(flights.run("a", call) for _ in range(2)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["broken", "broken"]
    call.error = None
    assert await flights.run("a", call) == 2


async def test_close_ends_the_wait_of_those_still_there() -> None:
    flights, call = SingleFlight[int](), Call()
    waiter = asyncio.create_task(flights.run("a", call))
    await settle()
    await flights.close()
    with pytest.raises(AbortedError):
        await waiter
    assert flights.num_running == 0
