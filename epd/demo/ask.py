"""One streamed chat request, over the public API like any client's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from epd.errors import WorkerError, from_dict

_REQUEST_ID_HEADER = "x-epd-request-id"
_MAX_EVENT_BYTES = 2**20


async def ask(url: str, body: dict[str, Any], on_text: Callable[[str], None]) -> tuple[str, str]:
    """Send `body` (with `stream` true); `on_text` gets each piece of the answer as it comes.

    Returns:
        The request's id and the whole answer.

    Raises:
        EPDError: the coordinator refused, or the answer broke off.
    """
    # The coordinator owns the deadlines of a request and ends it with an error.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    answer: list[str] = []
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=_MAX_EVENT_BYTES) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise from_dict(await response.json(content_type=None), response.status)
            async for line in response.content:
                event = _event(line)
                if event == "[DONE]":
                    return response.headers.get(_REQUEST_ID_HEADER, ""), "".join(answer)
                if piece := _text(event):
                    answer.append(piece)
                    on_text(piece)
    except (aiohttp.ClientError, ValueError) as exc:
        raise WorkerError(f"the answer broke off: {exc}") from exc
    raise WorkerError("the answer ended before it was complete")


def _event(line: bytes) -> str:
    """The data of a line of a server-sent event stream; empty for other lines."""
    name, _, value = line.decode().partition(":")
    return value.strip() if name == "data" else ""


def _text(event: str) -> str:
    if not event:
        return ""
    document = json.loads(event)
    if "error" in document:
        raise from_dict(document, 502)
    return "".join(choice["delta"].get("content") or "" for choice in document["choices"])
