from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from epd.engines.shell import Shell, StageWorker, bind, build_app, serve, wait_idle
from epd.errors import BadRequestError, ConfigError, MediaError, UnreachableError, WorkerError
from epd.types import WorkerState
from epd.wire import Load
from tests.engines.shell.fake_registry import TOKEN


class EchoStage:
    """A stage whose handlers wait, fail or answer as the test wishes."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.left = asyncio.Event()
        self.aborted: list[str] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/work/{rid}", self._work),
            web.post("/bad_image", self._bad_image),
            web.post("/bug", self._bug),
            web.post("/lonely", self._lonely),
        ]

    async def _work(self, request: web.Request) -> web.Response:
        self._shell.lifecycle.check_accepts_work()
        try:
            async with self._shell.requests.scope(request.match_info["rid"]):
                self.entered.set()
                await self.release.wait()
        finally:
            self.left.set()
        return web.json_response({"done": True})

    async def _bad_image(self, request: web.Request) -> web.Response:
        raise MediaError("no image", param="messages[0].content[1].image_url.url")

    async def _bug(self, request: web.Request) -> web.Response:
        raise KeyError("secret detail")

    async def _lonely(self, request: web.Request) -> web.Response:
        raise UnreachableError("somebody else cannot be reached")

    def load(self) -> Load:
        return Load(num_running_reqs=len(self._shell.requests), max_total_num_tokens=9)

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def wait_idle(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {"stage_detail": 1}

    async def close(self) -> None:
        return


class HoldsNothing(StageWorker):
    """A stage of handlers only."""

    def routes(self) -> list[web.RouteDef]:
        return []

    def load(self) -> Load:
        return Load()

    def describe(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        return


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self._session.get(
            self._url + path, headers=TOKEN.headers if headers is None else headers
        ) as response:
            return response.status, await response.json(content_type=None)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.post(
            self._url + path, json=body, headers=TOKEN.headers
        ) as response:
            return response.status, await response.json(content_type=None)


@asynccontextmanager
async def serving(shell: Shell, stage: StageWorker) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    runner = await serve(build_app(shell, stage, stall_s=1.0), listener)
    shell.lifecycle.move(WorkerState.READY)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if isinstance(stage, EchoStage):
            stage.release.set()
        await runner.cleanup()


async def test_everything_but_health_needs_the_cluster_token(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    async with serving(shell, EchoStage(shell)) as url:
        client = Client(session, url)
        assert (await client.get("/health", headers={}))[0] == 200
        for path in ("/ready", "/server_info", "/v1/loads", "/v1/models", "/metrics", "/nowhere"):
            status, body = await client.get(path, headers={})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        wrong = {"Authorization": "Bearer not-the-token-at-all"}
        assert (await client.get("/ready", headers=wrong))[0] == 401


async def test_common_endpoints_answer_in_sglangs_shapes(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    async with serving(shell, EchoStage(shell)) as url:
        client = Client(session, url)
        _, loads = await client.get("/v1/loads")
        assert loads["loads"][0]["dp_rank"] == 0
        assert loads["loads"][0]["max_total_num_tokens"] == 9
        _, info = await client.get("/server_info")
        assert (info["worker_id"], info["state"], info["stage_detail"]) == ("w1", "ready", 1)
        _, models = await client.get("/v1/models")
        assert models["data"][0]["id"] == "m"
        async with session.get(url + "/metrics", headers=TOKEN.headers) as response:
            assert "epd_kv_bytes_moved_total" in await response.text()


async def test_errors_keep_their_status_and_field_and_bugs_show_no_traceback(
    shell: Shell, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(shell, EchoStage(shell)) as url:
        client = Client(session, url)
        status, body = await client.post("/bad_image")
        assert status == 400
        assert body["error"]["param"] == "messages[0].content[1].image_url.url"
        status, body = await client.post("/bug")
        assert status == 500
        assert "secret detail" not in str(body)
        assert "secret detail" in caplog.text
        assert (await client.get("/nowhere"))[0] == 404


async def test_an_abort_answers_the_waiting_peer_and_reaches_the_stage(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    stage = EchoStage(shell)
    async with serving(shell, stage) as url:
        client = Client(session, url)
        work = asyncio.create_task(client.post("/work/r1"))
        await stage.entered.wait()
        status, body = await client.post("/abort_request", {"rid": "r1"})
        assert (status, body["num_aborted"]) == (200, 1)
        status, body = await work
        assert (status, body["error"]["code"]) == (499, "aborted")
        assert stage.aborted == ["r1"]
        assert (await client.post("/abort_request", {"rid": "unknown"}))[0] == 200
        assert (await client.post("/work/unknown"))[0] == 499
        assert (await client.post("/abort_request", {}))[0] == 400


async def test_a_peer_that_leaves_cancels_its_handler(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    stage = EchoStage(shell)
    async with serving(shell, stage) as url:
        work = asyncio.create_task(Client(session, url).post("/work/r1"))
        await stage.entered.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.wait_for(stage.left.wait(), 5)
        assert len(shell.requests) == 0


async def test_a_draining_worker_refuses_new_work_and_waits_for_the_old(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    stage = EchoStage(shell)
    async with serving(shell, stage) as url:
        client = Client(session, url)
        work = asyncio.create_task(client.post("/work/old"))
        await stage.entered.wait()
        shell.lifecycle.move(WorkerState.DRAINING)
        idle = asyncio.create_task(wait_idle(shell, stage))
        status, body = await client.post("/work/new")
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert (await client.get("/ready"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        assert not idle.done()
        stage.release.set()
        assert (await work)[0] == 200
        await asyncio.wait_for(idle, 5)


def test_a_port_in_use_is_a_one_line_config_error() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use") as refused:
            bind("127.0.0.1", port)
    assert "\n" not in refused.value.message


def test_an_address_of_another_machine_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("192.0.2.1", 0)


async def test_health_fails_while_one_computation_is_stuck(
    shell: Shell, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(shell, EchoStage(shell)) as url:
        monkeypatch.setattr(shell.compute, "busy_s", lambda: 5.0)
        status, body = await Client(session, url).get("/health")
        assert status == 503
        assert "5 s" in body["error"]["message"]


async def test_a_stage_that_holds_nothing_beyond_its_handlers_is_idle_and_can_abort(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    stage = HoldsNothing()
    async with serving(shell, stage) as url:
        assert (await Client(session, url).post("/abort_request", {"rid": "r"}))[0] == 200
        await asyncio.wait_for(wait_idle(shell, stage), 5)


async def test_a_peers_error_keeps_its_kind(shell: Shell, session: aiohttp.ClientSession) -> None:
    async with serving(shell, EchoStage(shell)) as url:
        with pytest.raises(MediaError) as refused:
            await shell.peers.call("POST", f"{url}/bad_image", Load, peer="a peer", timeout_s=5)
        assert refused.value.param == "messages[0].content[1].image_url.url"
        assert isinstance(refused.value, BadRequestError)


async def test_an_error_about_a_peer_names_it_and_keeps_its_url_to_itself(shell: Shell) -> None:
    url = "http://127.0.0.1:1/internal/encoders/a-capability/0/encode"
    with pytest.raises(UnreachableError) as unreachable:
        await shell.peers.call("POST", url, Load, peer="the prefill worker", timeout_s=5)
    assert unreachable.value.message == "the prefill worker cannot be reached"


async def test_a_peer_that_has_heard_the_call_is_not_unreachable(
    shell: Shell, session: aiohttp.ClientSession
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WorkerError, match="broke the connection") as broken:
            url = f"http://127.0.0.1:{port}/"
            await shell.peers.call("POST", url, Load, peer="a peer", timeout_s=5)
    assert not isinstance(broken.value, UnreachableError)
    async with serving(shell, EchoStage(shell)) as url:
        with pytest.raises(WorkerError, match="somebody else") as told:
            await shell.peers.call("POST", f"{url}/lonely", Load, peer="a peer", timeout_s=5)
    assert not isinstance(told.value, UnreachableError)
