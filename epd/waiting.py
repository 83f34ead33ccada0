"""Waiting for one thing unless another comes first. For every process; knows nothing of EPD."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(stop: Awaitable[Any], work: Awaitable[T]) -> T | None:
    """The result of `work`, or None if `stop` is done first.

    Reads as `await unless(worker.lost.wait(), ask(worker))`. If both are done at once, the work
    counts. Whichever is not done, or both if the caller is cancelled, is cancelled and has ended
    when this returns; to leave a task running, give `asyncio.wait([task])` as the work.

    Raises:
        Exception: what the work raised, or `stop` if that failed first.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        stopping.result()
        return None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
