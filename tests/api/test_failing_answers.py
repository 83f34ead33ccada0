"""How a client is told of an error: by status and headers, or inside an answer that has begun."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from epd.api.chat import ClientSink
from epd.error_response import error_response
from epd.errors import EPDError, OverloadedError, WorkerError
from epd.types import RequestId


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (OverloadedError("full", retry_after_s=2.5), "3"),
        (OverloadedError("full at a worker, which says no time"), "1"),
        (WorkerError("gone"), None),
    ],
)
def test_every_503_says_when_to_retry(error: EPDError, seconds: str | None) -> None:
    assert error_response(error).headers.get("Retry-After") == seconds


async def test_an_error_amid_a_stream_is_an_event_of_it() -> None:
    async with failing_after("text/event-stream", b"data: {}\n\n") as response:
        body = await response.read()
    assert body.startswith(b'data: {}\n\ndata: {"error": {"message": "gone"')


async def test_an_error_amid_a_whole_answer_cuts_it_off_instead_of_spoiling_its_json() -> None:
    async with failing_after("application/json", b'{"id": ') as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@asynccontextmanager
async def failing_after(content_type: str, begun: bytes) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The response to a request whose answer fails once `begun` has been sent."""

    async def handle(request: web.Request) -> web.StreamResponse:
        sink = ClientSink(request, RequestId("r"))
        await sink.start(content_type)
        await sink.write(begun)
        await sink.fail(WorkerError("gone"))
        assert sink.response is not None
        return sink.response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{host}:{port}/") as response,
        ):
            yield response
    finally:
        await runner.cleanup()
