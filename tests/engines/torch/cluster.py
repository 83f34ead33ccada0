"""The three torch workers and a stand-in coordinator in one process, over the loopback engine."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from PIL import Image

from epd.auth import ClusterToken
from epd.config import WorkerConfig
from epd.engines.run import run_worker
from epd.engines.shell import Identity, Lifecycle
from epd.transfer import LoopbackNetwork
from epd.types import Stage
from epd.wire import Span, WorkerReport
from tests.reference import Case

SECRET = "a-token-for-tests-only"
Intercept = Callable[[str, dict[str, Any]], Awaitable[web.Response | None]]


class FakeCoordinator:
    """Registers workers, serves media, forwards encoder slots; one hook to get in between."""

    def __init__(self) -> None:
        self.encode_url = ""
        self.media: dict[str, bytes] = {}
        self.spans: list[Span] = []
        self.reports: list[WorkerReport] = []
        self.intercept: Intercept | None = None
        """Sees each call to a slot; an answer of its own replaces the encode worker's."""
        self.changed = asyncio.Condition()
        self._token = ClusterToken(SECRET)
        self._session: aiohttp.ClientSession | None = None
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=2**26)
        app.router.add_put("/internal/workers/{worker_id}", self._register)
        app.router.add_get("/internal/media/{content_hash}", self._media)
        app.router.add_post("/slot/{slot}/{call}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as self._session:
            try:
                yield
            finally:
                await runner.cleanup()

    def add_media(self, data: bytes) -> dict[str, Any]:
        """The image_url of a part, as the coordinator's media edge rewrites it."""
        content_hash = hashlib.sha256(data).hexdigest()
        self.media[content_hash] = data
        return {"url": f"{self.url}/internal/media/{content_hash}", "content_hash": content_hash}

    async def wait_for_span(self, rid: str, name: str) -> Span:
        async with asyncio.timeout(5), self.changed:
            while True:
                for span in self.spans:
                    if (span.request_id, span.name) == (rid, name):
                        return span
                await self.changed.wait()

    async def _register(self, request: web.Request) -> web.Response:
        self._token.check(request.headers.get("Authorization"))
        report = WorkerReport.model_validate_json(await request.read())
        async with self.changed:
            self.reports.append(report)
            self.spans += report.spans
            self.changed.notify_all()
        paths = ["/slot/0", "/slot/1"]
        return web.json_response({"heartbeat_s": 0.2, "lease_s": 5.0, "encoder_paths": paths})

    async def _media(self, request: web.Request) -> web.Response:
        return web.Response(body=self.media[request.match_info["content_hash"]])

    async def _forward(self, request: web.Request) -> web.Response:
        self._token.check(request.headers.get("Authorization"))
        assert self._session is not None
        call, body = request.match_info["call"], await request.read()
        if self.intercept is not None:
            answer = await self.intercept(call, json.loads(body))
            if answer is not None:
                return answer
        async with self._session.post(
            f"{self.encode_url}/{call}", data=body, headers=self._token.headers
        ) as response:
            return web.Response(
                body=await response.read(), status=response.status, content_type="application/json"
            )


@dataclass
class Worker:
    identity: Identity
    lifecycle: Lifecycle
    task: asyncio.Task[None]


@dataclass
class Answer:
    status: int
    body: Any
    chunks: list[Any] = field(default_factory=list)
    """Of a stream: the events' documents, `[DONE]` as a string."""

    @property
    def text(self) -> str:
        if not self.chunks:
            return self.body["choices"][0]["message"]["content"]
        return "".join(
            chunk["choices"][0]["delta"].get("content", "")
            for chunk in self.chunks
            if isinstance(chunk, dict) and chunk.get("choices")
        )


class Cluster:
    """One worker of each stage, and a client that does the coordinator's part of a request."""

    def __init__(self, coordinator: FakeCoordinator, session: aiohttp.ClientSession) -> None:
        self.coordinator = coordinator
        self.network = LoopbackNetwork()
        self.workers: dict[Stage, Worker] = {}
        self.headers = ClusterToken(SECRET).headers
        self.session = session
        self._rooms = count(1)

    def url(self, stage: Stage) -> str:
        return self.workers[stage].identity.url

    async def start(self, config: WorkerConfig) -> None:
        ready: asyncio.Future[Identity] = asyncio.get_running_loop().create_future()
        lifecycle = Lifecycle()
        run = run_worker(
            config,
            on_ready=ready.set_result,
            transfer=self.network.engine(config.stage),
            lifecycle=lifecycle,
        )
        task = asyncio.create_task(run, name=f"{config.stage} worker")
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        self.workers[config.stage] = Worker(await ready, lifecycle, task)
        if config.stage is Stage.ENCODE:
            self.coordinator.encode_url = self.url(Stage.ENCODE)

    async def stop(self) -> None:
        for worker in self.workers.values():
            worker.lifecycle.stop()
            worker.lifecycle.stop()
        await asyncio.gather(*(worker.task for worker in self.workers.values()))

    def body(self, case: Case, rid: str, **fields: Any) -> dict[str, Any]:
        """The request as the coordinator sends it to prefill and decode."""
        images = iter(case.images)
        messages = json.loads(json.dumps(case.messages))
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "image_url":
                    part["image_url"] = self.coordinator.add_media(png(next(images)))
        prefill = self.workers[Stage.PREFILL].identity
        return {
            "model": prefill.model.model_id,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 8,
            "rid": rid,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": next(self._rooms),
            **fields,
        }

    async def post(self, stage: Stage, body: dict[str, Any]) -> Answer:
        url = f"{self.url(stage)}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=self.headers) as response:
            raw = await response.read()
            if response.content_type == "text/event-stream":
                return Answer(response.status, None, events(raw))
            return Answer(response.status, json.loads(raw))

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Both workers at once; decode's answer, once prefill has ended too."""
        prefill = asyncio.create_task(self.post(Stage.PREFILL, body))
        answer = await self.post(Stage.DECODE, body)
        await prefill
        return answer

    async def abort(self, rid: str, *stages: Stage) -> None:
        for stage in stages or Stage:
            await self.session.post(
                f"{self.url(stage)}/abort_request", json={"rid": rid}, headers=self.headers
            )

    async def metrics(self, stage: Stage) -> dict[str, float]:
        """Each sample by its name and labels, as the text format writes them."""
        async with self.session.get(self.url(stage) + "/metrics", headers=self.headers) as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def wait_for(self, stage: Stage, name: str, at_least: float = 1) -> None:
        """Return when a metric is so high; fails after 5 seconds."""
        found = 0.0
        for _ in range(500):
            found = (await self.metrics(stage)).get(name, 0)
            if found >= at_least:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{stage} {name} is {found}, not {at_least}")

    async def wait_at_rest(self) -> None:
        """Return when no worker holds anything for a request; fails after 5 seconds."""
        held: dict[str, float] = {}
        for _ in range(500):
            held = await self._held()
            if not held:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {held}")

    async def _held(self) -> dict[str, float]:
        names = (
            "epd_arena_pinned_bytes",
            "epd_rooms_open",
            "epd_kv_blocks_used",
            "epd_requests_running",
        )
        return {
            f"{stage} {name}": value
            for stage in self.workers
            for name, value in (await self.metrics(stage)).items()
            if name.startswith(names) and value
        }


@asynccontextmanager
async def running_cluster(model: Path, folder: Path, **fields: Any) -> AsyncIterator[Cluster]:
    """Start one worker of each stage; `fields` are of every worker's configuration."""
    token_file = folder / "token"
    token_file.write_text(SECRET)
    token_file.chmod(0o600)
    coordinator = FakeCoordinator()
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with coordinator.running(), session:
        cluster = Cluster(coordinator, session)
        try:
            for stage in Stage:
                await cluster.start(
                    WorkerConfig(
                        stage=stage,
                        model=str(model),
                        coordinator=coordinator.url,
                        token_file=token_file,
                        **fields,
                    )
                )
            yield cluster
        finally:
            await cluster.stop()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def events(raw: bytes) -> list[Any]:
    """The documents of a whole event stream."""
    pieces = raw.decode().split("\n\n")
    assert pieces.pop() == "", "the last event is complete"
    assert all(piece.startswith("data: ") for piece in pieces)
    payloads = [piece.removeprefix("data: ") for piece in pieces]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]
