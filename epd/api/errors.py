"""Errors on the way out: every failure leaves in OpenAI's shape, with its status."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable

from aiohttp import web

from epd.errors import BadRequestError, EPDError, TooLargeError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID_HEADER = "x-epd-request-id"
_RETRY_AFTER_S = 1.0  # what a 503 says that came without, such as a worker's


def error_response(error: EPDError) -> web.Response:
    """An error as a whole response."""
    headers: dict[str, str] = {}
    if error.request_id:
        headers[REQUEST_ID_HEADER] = error.request_id
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status == 503:
        retry_after_s = _RETRY_AFTER_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.to_dict(), status=error.status, headers=headers)


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
        return error_response(too_large(exc))
    except web.HTTPException as exc:
        error = BadRequestError(f"{request.method} {request.path}: {exc.reason}")
        return web.json_response(error.to_dict(), status=exc.status, headers=_allow(exc))
    except Exception:
        # The route, not the path: a path may carry a capability, or line breaks.
        resource = request.match_info.route.resource
        logger.exception("%s %s failed", request.method, resource and resource.canonical)
        return error_response(EPDError("internal error: see the coordinator's log"))


def too_large(exc: web.HTTPRequestEntityTooLarge) -> TooLargeError:
    return TooLargeError(f"the request body is too large: {exc.text}")


def _allow(exc: web.HTTPException) -> dict[str, str]:
    return {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
