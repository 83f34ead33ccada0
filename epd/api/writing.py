"""The end of every answer: a peer that does not read is hung up on."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Middleware

from epd.api.errors import Handler


def finish_within(limit_s: float) -> Middleware:
    """Send what a handler returns, or the end of what it has begun, within `limit_s`."""

    @web.middleware
    async def finish(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        try:
            async with asyncio.timeout(limit_s):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            hang_up(request)
        except asyncio.CancelledError:
            # Also where nobody cancels: aiohttp 3.14 raises it from each write that has to wait
            # after one that was cancelled while it waited.
            hang_up(request)
            raise
        return response

    return finish


def hang_up(request: web.Request) -> None:
    """Drop the connection and what is still to be written to it."""
    if request.transport is not None:
        request.transport.abort()
