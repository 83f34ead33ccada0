"""Runs a coordinator and its workers on this machine and stops them in order.

`epd up` and `epd demo` use it as a context: inside, the processes run and are restarted after a
crash; on the way out, workers drain, then the coordinator goes, and whatever is left is killed.
Should this process itself be killed, each child leaves by `--parent-pid` (see `commands`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from epd.errors import EPDError
from epd.pools.local.child import Child

ResultT = TypeVar("ResultT")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(EPDError):
    """Someone asked the deployment to stop (Ctrl-C or SIGTERM)."""

    code = "stopped"


class Supervisor:
    """The processes of one deployment.

    Args:
        coordinator: stopped last, so that draining workers can still finish requests; None if it
            runs on another machine.
        workers: stopped first, all at once.
        drain_s: how long workers may take to finish their work before they are killed.
        leave_s: the same for the coordinator.
    """

    def __init__(
        self,
        coordinator: Child | None,
        workers: Sequence[Child],
        *,
        drain_s: float = 65.0,
        leave_s: float = 10.0,
    ) -> None:
        self.coordinator = coordinator
        self.workers = tuple(workers)
        self._drain_s = drain_s
        self._leave_s = leave_s
        self._stop_asked = asyncio.Event()
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.ask_stop)
        first = () if self.coordinator is None else (self.coordinator,)
        for child in (*first, *self.workers):
            self._tasks[child] = asyncio.create_task(child.run(), name=child.spec.name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        try:
            # From here on one Ctrl-C is enough to hurry.
            self._stop_asked.set()
            await self._stop(self.workers, self._drain_s)
            if self.coordinator is not None:
                await self._stop((self.coordinator,), self._leave_s)
        finally:
            self.kill()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def ask_stop(self) -> None:
        """Stop the deployment; asked again, kill it at once."""
        if self._stop_asked.is_set():
            self.kill()
        self._stop_asked.set()

    def kill(self) -> None:
        """End all processes at once."""
        for child in self._tasks:
            child.kill()

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Await `work` for as long as the deployment can go on; then cancel it.

        Raises:
            StoppedError: a stop was asked.
            ConfigError: a process cannot work as it is configured.
            WorkerError: a process crashed more often than allowed.
        """
        own = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait(
                [own, stop, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED
            )
            if own.done():
                return own.result()
            for task in self._tasks.values():
                if task.done():
                    task.result()
            raise StoppedError("stopped")
        finally:
            for task in (own, stop):
                task.cancel()
            await asyncio.gather(own, stop, return_exceptions=True)

    async def until_stopped(self, work: Coroutine[Any, Any, object]) -> None:
        """Await `work` as `guard` does; a stop is then an end like any other."""
        with contextlib.suppress(StoppedError):
            await self.guard(work)

    async def _stop(self, children: Sequence[Child], timeout_s: float) -> None:
        for child in children:
            child.terminate()
        if children:
            await asyncio.wait([self._tasks[child] for child in children], timeout=timeout_s)
        for child in children:
            child.kill()
