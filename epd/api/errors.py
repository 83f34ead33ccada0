"""Errors on the way out: every failure leaves in OpenAI's shape, with its status."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from epd.error_response import error_response
from epd.errors import BadRequestError, EPDError, TooLargeError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_event(error: EPDError) -> bytes:
    """An error as a server-sent event, for a stream that has begun."""
    return b"data: " + json.dumps(error.to_dict()).encode() + b"\n\n"


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an error response."""
    try:
        return await handler(request)
    except EPDError as exc:
        return error_response(exc)
    except web.HTTPRequestEntityTooLarge as exc:
        return error_response(TooLargeError(f"the request body is too large: {exc.text}"))
    except web.HTTPException as exc:
        error = BadRequestError(f"{request.method} {request.path}: {exc.reason}")
        return web.json_response(error.to_dict(), status=exc.status, headers=_allow(exc))
    except Exception:
        # The route, not the path: a path may carry a capability, or line breaks.
        resource = request.match_info.route.resource
        logger.exception("%s %s failed", request.method, resource and resource.canonical)
        return error_response(EPDError("internal error: see the coordinator's log"))


def _allow(exc: web.HTTPException) -> dict[str, str]:
    return {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
