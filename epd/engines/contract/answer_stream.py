"""The server-sent events of one streamed answer, and how a failure in the middle is told."""

from __future__ import annotations

import asyncio

from aiohttp import web

from epd.engines.contract.answers import error_event
from epd.errors import AbortedError, DeadlineError, EPDError

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}
_LAST_WORDS_S = 1.0


class AnswerStream:
    """Begins with the first event, so that an error before it can still be an HTTP status."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send events; waits while the peer reads slowly.

        Raises:
            AbortedError: the peer has left.
            DeadlineError: the peer took nothing for too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.has_begun:
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except TimeoutError:
            raise DeadlineError("the peer stopped reading its answer") from None
        except ConnectionError as exc:
            raise AbortedError("the peer left") from exc

    async def fail(self, error: EPDError) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.response.write(error_event(error))
                await self.response.write_eof()
        except (TimeoutError, ConnectionError):
            self.response.force_close()
        return self.response
