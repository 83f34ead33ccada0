"""How a client is told of an error: by status and headers, or inside an answer that has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware

from epd.api.chat import ClientSink
from epd.api.errors import Handler
from epd.api.writing import finish_within
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


async def test_a_peer_that_does_not_read_an_answer_is_hung_up_on() -> None:
    body = bytes(2**24)

    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async with served(large, finish_within(0.2)) as (response, runner):
        assert runner.server is not None
        async with asyncio.timeout(5):
            while runner.server.connections:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.01)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    async with served(large, finish_within(60)) as (response, _):
        assert await response.read() == body


async def test_an_answer_whose_end_was_given_up_is_hung_up_on_at_once() -> None:
    is_given_up = asyncio.Event()

    async def give_up(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await response.write(bytes(2**24))
        is_given_up.set()
        return response

    async with served(give_up, finish_within(60)) as (response, _), asyncio.timeout(10):
        # A client that read before would have taken all of it in time.
        await is_given_up.wait()
        with pytest.raises(aiohttp.ClientError):
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

    async with served(handle) as (response, _):
        yield response


@asynccontextmanager
async def served(
    handler: Handler, *middlewares: Middleware
) -> AsyncGenerator[tuple[aiohttp.ClientResponse, web.AppRunner]]:
    """The response, headers read, to a request that `handler` answers."""
    app = web.Application(middlewares=middlewares)
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{host}:{port}/") as response,
        ):
            yield response, runner
    finally:
        await runner.cleanup()
