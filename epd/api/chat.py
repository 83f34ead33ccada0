"""`POST /v1/chat/completions`: the client's side of a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from aiohttp import web

from epd.api.errors import REQUEST_ID_HEADER, error_event, too_large
from epd.coordinator.coordinator import Coordinator
from epd.errors import EPDError
from epd.types import RequestId


def mint_request_id() -> RequestId:
    """An id in the style of OpenAI's, with 96 random bits."""
    return RequestId(f"chatcmpl-{secrets.token_hex(12)}")


class ClientSink:
    """Relays an answer to the client's connection."""

    def __init__(self, request: web.Request, request_id: RequestId) -> None:
        self._request = request
        self._request_id = request_id
        self.response: web.StreamResponse | None = None

    @property
    def has_started(self) -> bool:
        return self.response is not None

    async def start(self, content_type: str) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                # A reverse proxy that buffers would hold tokens back.
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: self._request_id,
            }
        )
        await self.response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None
        await self.response.write(chunk)


class ChatEndpoint:
    """Reads a chat request, has the coordinator answer it, and tells the client how it ended."""

    def __init__(
        self, coordinator: Coordinator, mint: Callable[[], RequestId] = mint_request_id
    ) -> None:
        self._coordinator = coordinator
        self._mint = mint

    async def handle(self, request: web.Request) -> web.StreamResponse:
        request_id = self._mint()
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as exc:
            raise too_large(exc) from None
        record = self._coordinator.log.open(request_id)
        sink = ClientSink(request, request_id)
        try:
            await self._coordinator.chat(record, body, sink)
        except EPDError as exc:
            if sink.response is None:
                raise
            await sink.write(error_event(exc))
        assert sink.response is not None, "a finished request has an answer"
        await sink.response.write_eof()
        return sink.response
