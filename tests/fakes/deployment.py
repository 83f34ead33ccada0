"""A coordinator as its process builds it, in this loop, over a fake fleet."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from epd.addresses import http_url
from epd.api.server import build_app, build_coordinator, build_runner
from epd.auth import APIKeys, ClusterToken
from epd.clock import Clock, SystemClock
from epd.config import CoordinatorConfig
from epd.coordinator.coordinator import Coordinator
from epd.types import Stage
from tests.fakes.fleet import MODEL, FakeDecode, FakeEncode, FakePrefill, Fleet, running_fleet
from tests.media.images import png

TOKEN = ClusterToken("the-cluster-token-of-the-tests")
ONE_OF_EACH = {Stage.ENCODE: 1, Stage.PREFILL: 1, Stage.DECODE: 1}


def data_url(image: bytes | None = None) -> str:
    return "data:image/png;base64," + base64.b64encode(image or png()).decode()


def image_part(url: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url or data_url()}}


def chat_body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request; with `parts` (images) before its text."""
    content: Any = [*parts, {"type": "text", "text": "hi"}] if parts else "hi"
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


@dataclass
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[bytes]:
        """Payloads of the server-sent events."""
        events = self.body.split(b"\n\n")
        assert events.pop() == b"", "the last event is whole"
        assert all(event.startswith(b"data: ") for event in events), self.body
        return [event.removeprefix(b"data: ") for event in events]


@dataclass
class Deployment:
    url: str
    coordinator: Coordinator
    fleet: Fleet
    session: aiohttp.ClientSession
    runner: web.AppRunner

    def is_connected(self, response: aiohttp.ClientResponse) -> bool:
        """Whether the coordinator still has the connection of a response being read."""
        assert self.runner.server is not None
        assert response.connection is not None
        assert response.connection.transport is not None
        ours = response.connection.transport.get_extra_info("sockname")
        return any(
            connection.transport is not None
            and connection.transport.get_extra_info("peername") == ours
            for connection in self.runner.server.connections
        )

    @property
    def encode(self) -> FakeEncode:
        return self.fleet.of(Stage.ENCODE)[0]

    @property
    def prefill(self) -> FakePrefill:
        return self.fleet.of(Stage.PREFILL)[0]

    @property
    def decode(self) -> FakeDecode:
        return self.fleet.of(Stage.DECODE)[0]

    async def request(
        self, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        if isinstance(data, bytes):
            data = io.BytesIO(data)  # aiohttp warns of large bytes
        async with self.session.request(
            method, self.url + path, data=data, headers=headers
        ) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def chat(self, *parts: dict[str, Any], **fields: Any) -> Answer:
        return await self.send(chat_body(*parts, **fields))

    async def send(self, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", "/v1/chat/completions", data, headers)

    async def metrics(self) -> dict[str, float]:
        answer = await self.request("GET", "/metrics", headers=TOKEN.headers)
        assert answer.status == 200
        return {
            sample.name + str(sorted(sample.labels.items()) or ""): sample.value
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
        }

    async def record(self, answer: Answer) -> Any:
        """The timeline of an answered request."""
        request_id = answer.headers["x-epd-request-id"]
        found = await self.request("GET", f"/admin/requests/{request_id}", headers=TOKEN.headers)
        return found.json

    async def last_record(self) -> Any:
        log = self.coordinator.log
        request_id = [*log._ended, *log._running][-1]
        found = await self.request("GET", f"/admin/requests/{request_id}", headers=TOKEN.headers)
        return found.json

    async def held(self) -> dict[str, float]:
        """What requests hold now, in the coordinator and on the fake workers; empty when idle."""
        held = {k: v for k, v in (await self.metrics()).items() if "in_flight" in k and v}
        held["running records"] = len(self.coordinator.log._running)
        held["tickets"] = self.coordinator.admission.scheduler.num_tickets
        held["pinned media bytes"] = self.coordinator.media_cache.pinned_bytes
        for worker in self.coordinator.registry.all():
            held[f"{worker}: requests"] = worker.num_in_flight
            held[f"{worker}: tokens"] = worker.tokens_in_flight
        for fake in self.fleet.workers.values():
            held[f"{fake.worker_id}: handlers"] = fake.num_running
        return {name: amount for name, amount in held.items() if amount}

    async def settle(self, timeout_s: float = 5.0) -> None:
        """Return once nothing is held by any request any more."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.held():  # noqa: ASYNC110 - the fakes' side has no event
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"still held: {await self.held()}") from None


@asynccontextmanager
async def deployed(
    *,
    workers: Mapping[Stage, int] = ONE_OF_EACH,
    clock: Clock | None = None,
    api_keys: APIKeys | None = None,
    host: str = "127.0.0.1",
    **config: Any,
) -> AsyncIterator[Deployment]:
    """Run a coordinator and a fleet; at the end nothing may be held, and no task may be left.

    Args:
        workers: number of workers of each stage.
        clock: of the coordinator.
        api_keys: of clients; none are needed by default.
        host: loopback address of everyone.
        **config: sections of `CoordinatorConfig`.
    """
    before = asyncio.all_tasks()
    settings = CoordinatorConfig(**{"lease": {"lease_s": 60.0}, **config})
    clock = clock or SystemClock()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        url = http_url(host, listener.getsockname()[1])
        async with build_coordinator(settings, TOKEN, base_url=url, clock=clock) as coordinator:
            app = build_app(
                coordinator, settings, token=TOKEN, api_keys=api_keys or APIKeys([]), clock=clock
            )
            runner = build_runner(app)
            await runner.setup()
            await web.SockSite(runner, listener).start()
            connector = aiohttp.TCPConnector(limit=0)
            try:
                async with (
                    aiohttp.ClientSession(connector=connector) as session,
                    running_fleet(url, host, TOKEN) as fleet,
                ):
                    for stage, count in workers.items():
                        for index in range(count):
                            await fleet.add(stage, f"{stage}-{index}")
                    deployment = Deployment(url, coordinator, fleet, session, runner)
                    yield deployment
                    await deployment.settle()
                await coordinator.drain(1.0)
            finally:
                await runner.cleanup()
    await asyncio.sleep(0)
    ours = {asyncio.current_task()}
    left = {task for task in asyncio.all_tasks() - before - ours if not task.done()}
    assert not left, f"tasks left over: {left}"
