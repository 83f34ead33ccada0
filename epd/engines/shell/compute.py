"""The one thread in which a worker's blocking computation runs, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from epd.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs jobs one after another, off the event loop, and knows how long the present one takes."""

    def __init__(self, clock: Clock, name: str = "compute") -> None:
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._busy_since: float | None = None

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `job` in the thread.

        Cancellation drops a job that has not begun. One that has begun cannot be stopped: the
        cancellation then takes effect when it ends, since the memory it works on may be given to
        somebody else as soon as this call returns. Keep jobs short.
        """
        future = self._executor.submit(self._timed, job, *args, **kwargs)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not waiter.cancelled():
                await _settle(future, waiter)
            raise

    def beat(self) -> None:
        """Called by a long job for each step it makes: it is busy, not stuck."""
        self._busy_since = self._clock.monotonic()

    def busy_s(self) -> float:
        """Seconds since the running job began or last beat; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def close(self) -> None:
        """Let the running job end in its own time and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _timed(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._busy_since = self._clock.monotonic()
        try:
            return job(*args, **kwargs)
        finally:
            self._busy_since = None


async def _settle(future: Future[T], waiter: asyncio.Future[T]) -> None:
    if future.cancel():
        return
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue  # the first cancellation is raised once the job has ended
    if not waiter.cancelled():
        waiter.exception()  # retrieved: nobody else will
