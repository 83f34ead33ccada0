"""The admin client against servers that are well, refuse, talk nonsense or are not there."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epd.auth import ClusterToken
from epd.errors import AuthenticationError, BadRequestError, WorkerError
from epd.pools.local import free_port
from epd.sdk import AdminClient
from epd.types import Stage

TOKEN = ClusterToken("a" * 32)
WORKER = {
    "worker_id": "encode-0",
    "stage": "encode",
    "engine": "torch",
    "state": "ready",
    "url": "http://127.0.0.1:1",
    "epoch": 5,
    "pid": 7,
    "age_s": 0.5,
    "model_id": "m",
    "load": {"num_running_reqs": 2, "num_completed_reqs": 9},
    "a_field_of_a_newer_release": 1,
}


@asynccontextmanager
async def client_of(answer: Callable[[web.Request], web.Response]) -> AsyncGenerator[AdminClient]:
    async def handle(request: web.Request) -> web.Response:
        TOKEN.check(request.headers.get("Authorization"))
        return answer(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        async with AdminClient(f"http://127.0.0.1:{port}/", TOKEN) as client:
            yield client
    finally:
        await runner.cleanup()


def json_answer(body: Any, status: int = 200) -> Callable[[web.Request], web.Response]:
    return lambda _: web.json_response(body, status=status)


async def test_workers_are_read_with_fields_of_a_newer_release_ignored() -> None:
    async with client_of(json_answer({"workers": [WORKER]})) as client:
        (worker,) = await client.workers()
    assert (worker.worker_id, worker.stage, worker.state) == ("encode-0", Stage.ENCODE, "ready")
    assert worker.load.num_running_reqs == 2


async def test_a_timeline_may_lack_what_did_not_happen() -> None:
    body = {"request_id": "r", "created_unix_s": 1.0, "outcome": "failed", "ttft_s": None}
    async with client_of(json_answer(body)) as client:
        record = await client.request("r")
    assert (record.outcome, record.ttft_s, record.spans) == ("failed", None, [])


async def test_the_coordinators_refusal_is_raised_as_it_was_meant() -> None:
    error = AuthenticationError("no").to_dict()
    async with client_of(json_answer(error, 401)) as client:
        with pytest.raises(AuthenticationError, match=r"^no$"):
            await client.workers()
    async with client_of(lambda _: web.Response(status=404, text="nothing here")) as client:
        with pytest.raises(BadRequestError, match=r"^nothing here$"):
            await client.request("r")


@pytest.mark.parametrize("text", ["<html>", "[]", "5", '{"workers": [{"worker_id": 5}]}'])
async def test_an_answer_that_is_no_coordinators_is_told_so(text: str) -> None:
    async with client_of(lambda _: web.Response(text=text)) as client:
        with pytest.raises(WorkerError, match=r"is it an EPD coordinator\?|not understood"):
            await client.workers()


async def test_a_redirect_is_not_followed_with_the_cluster_token() -> None:
    paths: list[str] = []

    def redirect(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=302, headers={"Location": "/elsewhere"})

    async with client_of(redirect) as client:
        with pytest.raises(WorkerError, match="is it an EPD coordinator"):
            await client.workers()
    assert paths == ["/admin/workers"]


async def test_a_coordinator_that_is_not_there_is_told_so() -> None:
    async with AdminClient(f"http://127.0.0.1:{free_port()}", TOKEN) as client:
        with pytest.raises(WorkerError, match="no coordinator can be reached at"):
            await client.workers()
