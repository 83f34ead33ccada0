"""Log format, set once per process by its entry point.

Fixed keys, given as `extra={...}`: request_id, stage, worker_id, room. Prompts, images, keys and
tokens are never logged.
"""

from __future__ import annotations

import logging
import sys

_KEYS = ("stage", "worker_id", "request_id", "room")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        keys = [
            f"{key}={value}" for key in _KEYS if (value := getattr(record, key, None)) is not None
        ]
        return f"{line} {' '.join(keys)}" if keys else line


def configure_logs(level: str) -> None:
    """Send all logs to standard error at `level` ("debug", "info", "warning", "error")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
