"""Log format, set once per process by its entry point.

Fixed keys, given as `extra={...}`: request_id, stage, worker_id, room. Prompts, images, keys and
tokens are never logged.
"""

from __future__ import annotations

import logging
import sys

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

_KEYS = ("stage", "worker_id", "request_id", "room")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        keys = [
            f"{key}={value}" for key in _KEYS if (value := getattr(record, key, None)) is not None
        ]
        return f"{line} {' '.join(keys)}" if keys else line


def is_no_malformed_request(record: logging.LogRecord) -> bool:
    """A filter for aiohttp's server: it would log a malformed request as an error of ours.

    The client has been told; and the exception quotes the offending header, which may be a key.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | RequestPayloadError)


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
