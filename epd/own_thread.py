"""A thread of its own for one call that may block for long and cannot be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(call: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run `call` in a new thread; the future gets its result or exception.

    Whoever waits may cancel the future and go: the call then ends in its own time, and keeps
    neither the loop nor the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, call())
        except Exception as error:
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
