"""A worker's life: starting → ready → draining → gone, and what moves it along.

SIGTERM or SIGINT begins draining: new work is refused, what runs is finished. A second signal
stops at once. A worker that was given its parent's pid drains when that parent disappears, so
that a supervisor killed with SIGKILL leaves no orphans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from epd.errors import OverloadedError
from epd.types import WorkerState

_log = logging.getLogger(__name__)
_PARENT_POLL_S = 0.5

_NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


class Lifecycle:
    """The worker's state, and the wish to stop."""

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self._drain = asyncio.Event()
        self._kill = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener()` is called after each change of state."""
        self._listeners.append(listener)

    def move(self, to: WorkerState) -> None:
        """Raises ValueError if the transition is illegal."""
        if to not in _NEXT[self.state]:
            raise ValueError(f"a worker cannot go from {self.state} to {to}")
        self.state = to
        for listener in self._listeners:
            listener()

    def check_accepts_work(self) -> None:
        """Raises OverloadedError (503, retryable elsewhere) unless ready."""
        if self.state is not WorkerState.READY:
            raise OverloadedError(f"this worker is {self.state} and takes no new work")

    def stop(self) -> None:
        """Begin draining; called again, give up on what still runs."""
        (self._kill if self._drain.is_set() else self._drain).set()

    async def wait_drain(self) -> None:
        await self._drain.wait()

    async def wait_kill(self) -> None:
        await self._kill.wait()

    def install_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    @staticmethod
    def remove_signals(loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        was_draining = self._drain.is_set()
        _log.info("%s: %s", number.name, "stopping at once" if was_draining else "draining")
        self.stop()

    async def watch_parent(
        self, parent_pid: int, *, getppid: Callable[[], int] = os.getppid
    ) -> None:
        """Drain once the parent is another process than `parent_pid`. Runs until then."""
        # Portable Unix offers no event for the death of a parent, only the adoption by another.
        while getppid() == parent_pid:  # noqa: ASYNC110
            await asyncio.sleep(_PARENT_POLL_S)
        _log.warning("the parent process %d is gone: draining", parent_pid)
        if not self._drain.is_set():
            self.stop()
