"""What every request to a worker passes through: the cluster token, and errors made answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from epd.auth import ClusterToken
from epd.error_response import error_response
from epd.errors import BadRequestError, EPDError

_log = logging.getLogger(__name__)
_OPEN_PATHS = frozenset({"/health"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_token(token: ClusterToken) -> Middleware:
    """Refuses requests without the cluster token, except for liveness probes."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            token.check(request.headers.get("Authorization"))
        return await handler(request)

    return check


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into error answers; a peer never sees a traceback.

    A handler that has begun to stream reports its errors inside the stream itself.
    """
    try:
        return await handler(request)
    except EPDError as error:
        if error.status >= 500:
            _log.warning("%s answered %d: %s", request.path, error.status, error.message)
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        raise
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        error = BadRequestError(f"{request.method} {request.path}: {exc.reason}")
        return web.json_response(error.to_dict(), status=exc.status)
    except Exception:
        _log.exception("%s failed", request.path)
        return error_response(EPDError("internal error: see the worker's log"))
