"""An error as an HTTP answer, in the one shape of the coordinator and the workers."""

from __future__ import annotations

import math

from aiohttp import web

from epd.errors import EPDError

REQUEST_ID_HEADER = "x-epd-request-id"
_RETRY_AFTER_S = 1.0  # what a 503 says that came without, such as a worker's


def error_response(error: EPDError) -> web.Response:
    """The error in OpenAI's shape, with its status and what a client may do about it."""
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
