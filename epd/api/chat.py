"""`POST /v1/chat/completions`: the client's side of a request."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Generator
from functools import partial

from aiohttp import web

from epd.api.errors import error_event
from epd.api.writing import hang_up
from epd.auth import Caller
from epd.coordinator.admission import CLASS_HEADER
from epd.coordinator.body_budget import BodyShare
from epd.coordinator.coordinator import Coordinator
from epd.error_response import REQUEST_ID_HEADER
from epd.errors import AbortedError, BadRequestError, EPDError
from epd.types import RequestId

_BODY_S = 60.0
_SILENCE_S = 10.0
_FAREWELL_S = 1.0
_EVENT_STREAM = "text/event-stream"


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
        response = web.StreamResponse(
            headers={
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                # A reverse proxy that buffers would hold tokens back.
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: self._request_id,
            }
        )
        with _client_may_leave():
            await response.prepare(self._request)
        self.response = response

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None, "write comes after start"
        with _client_may_leave():
            await self.response.write(chunk)

    async def finish(self) -> None:
        assert self.response is not None, "finish comes after start"
        with _client_may_leave():
            await self.response.write_eof()

    async def fail(self, error: EPDError) -> None:
        """End an answer that has begun: a stream with an error event, else by hanging up.

        A client that does not read is hung up on, too.
        """
        assert self.response is not None, "an error before the start has a status of its own"
        is_told = False
        try:
            if self.response.content_type != _EVENT_STREAM:
                return  # an event amid JSON would only spoil it
            async with asyncio.timeout(_FAREWELL_S):
                await self.write(error_event(error))
                await self.finish()
                is_told = True
        except (TimeoutError, AbortedError):
            pass
        finally:
            # Also on CancelledError: aiohttp 3.14 raises it, though nobody cancels, from each
            # write that has to wait after one that was cancelled while it waited.
            if not is_told:
                hang_up(self._request)


class ChatEndpoint:
    """Reads a chat request, has the coordinator answer it, and tells the client how it ended."""

    def __init__(
        self,
        coordinator: Coordinator,
        identify: Callable[[str | None], Caller],
        mint: Callable[[], RequestId] = mint_request_id,
    ) -> None:
        """Wire it.

        Args:
            coordinator: answers.
            identify: who sends an `Authorization` header that has been let in.
            mint: gives a new request's id.
        """
        self._coordinator = coordinator
        self._identify = identify
        self._mint = mint

    async def handle(self, request: web.Request) -> web.StreamResponse:
        caller = self._identify(request.headers.get("Authorization"))
        request_id = self._mint()
        record = self._coordinator.log.open(request_id)
        sink = ClientSink(request, request_id)
        try:
            await self._coordinator.chat(
                record,
                partial(read_body, request),
                sink,
                caller=caller,
                wanted_class=request.headers.get(CLASS_HEADER),
            )
        except EPDError as exc:
            if not sink.has_started:
                raise
            await sink.fail(exc)
        assert sink.response is not None, "a finished request has an answer"
        return sink.response


async def read_body(request: web.Request, share: BodyShare) -> bytearray:
    """The request's body. Unlike `request.read` this leaves no copy with the request.

    Raises:
        TooLargeError: more bytes than allowed.
        OverloadedError: no room for them beside those of other requests.
        BadRequestError: it came too slowly, or stopped coming, or cannot be decompressed.
        AbortedError: the client left.
    """
    share.check(request.content_length or 0)
    body = bytearray()
    try:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _BODY_S
        async with asyncio.timeout(_SILENCE_S) as limit:
            with _client_may_leave():
                async for chunk in request.content.iter_any():
                    share.take(len(chunk))
                    body += chunk
                    limit.reschedule(min(loop.time() + _SILENCE_S, end_s))
    except TimeoutError:
        raise BadRequestError(
            f"the request body did not arrive within {_BODY_S:g} s, or nothing of it for "
            f"{_SILENCE_S:g} s"
        ) from None
    except web.RequestPayloadError as exc:
        raise BadRequestError("the request body cannot be read as it was sent") from exc
    return body


@contextlib.contextmanager
def _client_may_leave() -> Generator[None]:
    try:
        yield
    except ConnectionError as exc:
        raise AbortedError("the client left") from exc
