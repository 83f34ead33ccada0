"""Tasks that nobody awaits: none of them dies unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


async def keep_running(
    what: str, work: Callable[[], Awaitable[object]], *, pause_s: float = 1.0
) -> NoReturn:
    """Run `work`, which is to go on until cancelled, and begin it again should it crash or end.

    Args:
        what: names it in the log, as in `what crashed`.
        work: begins it.
        pause_s: between a crash and the new beginning.
    """
    while True:
        try:
            await work()
            logger.error("%s ended by itself; it begins again in %g s", what, pause_s)
        except Exception:
            logger.exception("%s crashed; it begins again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)


def log_crash(task: asyncio.Task[Any]) -> None:
    """A done callback for a task that runs once: logs its exception with the traceback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the task %s crashed", task.get_name(), exc_info=error)
