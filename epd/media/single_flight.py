"""Joins calls for the same thing that are under way at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epd.errors import AbortedError

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    num_waiters: int = 0


class SingleFlight(Generic[T]):
    """Runs at most one call per key; whoever asks meanwhile waits for the same result.

    The call runs in a task of its own, so a waiter that is cancelled leaves the others waiting;
    when the last one leaves, the task is cancelled. Nothing is kept after the call ends.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # cancelled ones too, until they have ended

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def run(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """The result of the running call for `key`, or of `call` if there is none.

        Raises:
            AbortedError: `close` was called.
            Exception: whatever the call raised, the same object for every waiter.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._start(key, call))
        flight.num_waiters += 1
        try:
            await asyncio.wait((flight.task,))  # unlike awaiting it, leaving does not cancel it
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                self._forget(key, flight.task)  # a newcomer must not join what is being stopped
                flight.task.cancel()
        if flight.task.cancelled():
            raise AbortedError("the media edge is shutting down")
        return flight.task.result()

    async def close(self) -> None:
        """Cancel what runs and wait until it has stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, key: str, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        async def fly() -> T:
            return await call()

        task = asyncio.get_running_loop().create_task(fly())
        self._tasks.add(task)

        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            self._forget(key, task)
            if not task.cancelled():
                task.exception()  # seen, even if every waiter has left

        task.add_done_callback(end)
        return task

    def _forget(self, key: str, task: asyncio.Task[Any]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
