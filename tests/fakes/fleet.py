"""Fake workers over real HTTP on loopback: they speak the contract, compute nothing, obey tests.

Embeddings and KV are only pretended, but every message that a real worker would send or expect is
sent and checked: media are fetched and their hash verified, parts are encoded before they are sent,
decode waits for prefill's room. Faults come on command, see `Faults`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from encoders import ImageBudget
from epd.addresses import http_url
from epd.auth import ClusterToken
from epd.types import Stage, WorkerState
from epd.wire import ModelCard, WorkerReport

BUDGET = ImageBudget(patch_size=14, merge_size=2, min_pixels=784, max_pixels=784 * 100)
MODEL = "tiny"
DIM = 8


@dataclass
class Faults:
    """What a worker does wrong; set before or during a request.

    Attributes:
        status: answer with this status instead of working, and `body` or a default error.
        body: of the answer with `status`.
        hold: wait for this event before working; one that is never set is a hang.
        cut: close the connection instead of answering.
        hold_after: (decode) wait for `hold` only after this many tokens.
        cut_after: (decode) cut the connection after this many tokens.
        end_after: (decode) end the stream without [DONE] after this many tokens.
        error_after: (decode) send an error event after this many tokens.
        cut_whole: (decode) cut an answer that is not a stream in its middle.
        fail_after_handoff: (prefill) cut the connection once decode can take over.
    """

    status: int | None = None
    body: Any = None
    hold: asyncio.Event | None = None
    cut: bool = False
    hold_after: int = 0
    cut_after: int | None = None
    end_after: int | None = None
    error_after: int | None = None
    cut_whole: bool = False
    fail_after_handoff: bool = False


def sse(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def cut(request: web.Request) -> None:
    """Break the connection; the handler is then cancelled, as its peer has gone."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()


class FakeWorker:
    """One worker of one stage: its server, its registration and what it received."""

    stage: Stage

    def __init__(self, fleet: Fleet, worker_id: str) -> None:
        self.fleet = fleet
        self.worker_id = worker_id
        self.faults = Faults()
        self.epoch = 1
        self.state = WorkerState.READY
        self.model_id = MODEL
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.num_running = 0
        self.num_cancelled = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return http_url(self.fleet.host, self._port)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.received if at == path]

    def report(self, **changes: Any) -> WorkerReport:
        return WorkerReport(
            **{
                "worker_id": self.worker_id,
                "epoch": self.epoch,
                "stage": self.stage,
                "engine": "fake",
                "state": self.state,
                "url": self.url,
                "bootstrap_port": 9 if self.stage is Stage.PREFILL else None,
                "model": ModelCard(
                    model_id=self.model_id,
                    model_type="qwen2_vl",
                    context_tokens=1000,
                    image_budget=BUDGET,
                ),
                **changes,
            }
        )

    async def register(self, **changes: Any) -> None:
        """A heartbeat."""
        async with self.fleet.session.put(
            f"{self.fleet.coordinator}/internal/workers/{self.worker_id}",
            data=self.report(**changes).model_dump_json(),
            headers=self.fleet.token.headers,
        ) as response:
            assert response.status == 200, await response.text()
            self.fleet.slots = (await response.json())["encoder_paths"]

    async def start(self) -> None:
        app = web.Application(client_max_size=2**27)
        app.router.add_post("/abort_request", self._abort)
        for path, work in self.routes().items():
            app.router.add_post(path, self._handler(path, work))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.fleet.host, self._port).start()
        self._port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """Vanish as a killed process does: connections break, new ones are refused."""
        if self._runner is not None and self._runner.server is not None:
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    def routes(self) -> dict[str, Callable[..., Coroutine[Any, Any, web.StreamResponse]]]:
        raise NotImplementedError

    def _handler(self, path: str, work: Callable[..., Any]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.fleet.token.check(request.headers.get("Authorization"))
            body = json.loads(await request.read())
            self.num_running += 1
            try:
                async with self.fleet.changed:
                    self.received.append((path, body))
                    self.fleet.changed.notify_all()
                faults = self.faults
                if faults.cut:
                    await cut(request)
                if faults.hold is not None and not faults.hold_after:
                    await faults.hold.wait()
                if faults.status is not None:
                    error = {"error": {"message": f"{self.worker_id} says no", "code": "x"}}
                    return web.json_response(faults.body or error, status=faults.status)
                return await work(request, body)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            finally:
                self.num_running -= 1
                async with self.fleet.changed:
                    self.fleet.changed.notify_all()

        return handle

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        async with self.fleet.changed:
            self.aborted.append(rid)
            self.fleet.changed.notify_all()
        return web.json_response({"rid": rid})


class FakeEncode(FakeWorker):
    stage = Stage.ENCODE

    def __init__(self, fleet: Fleet, worker_id: str) -> None:
        super().__init__(fleet, worker_id)
        self.parts: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.sent: list[str] = []
        self.num_receivers = 0
        """Above 0: push a part to so many receivers before its /encode ends, as SGLang does."""
        self.receivers: dict[str, set[str]] = {}

    def routes(self) -> Any:
        return {
            "/encode": self._encode,
            "/scheduler_receive_url": self._receiver,
            "/scheduler_receive_meta_data": self._metadata,
            "/send": self._send,
        }

    def _part(self, req_id: str) -> asyncio.Future[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        return self.parts.setdefault(req_id, loop.create_future())

    async def _encode(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        for item in body["mm_items"]:
            # Without a token: the URL itself is the right to read.
            async with self.fleet.session.get(item["url"]) as response:
                if response.status != 200:
                    return web.json_response(await response.json(), status=response.status)
                data = await response.read()
            content_hash = item["content_hash"].removeprefix("sha256:")
            assert content_hash == hashlib.sha256(data).hexdigest(), "another image"
        sizes = {
            "req_id": body["req_id"],
            "part_idx": body["part_idx"],
            "embedding_size": 4 * DIM,
            "embedding_len": 1,
            "embedding_dim": DIM,
        }
        self._part(body["req_id"]).set_result(sizes)
        if self.num_receivers:
            await self.fleet.until(
                lambda: len(self.receivers.get(body["req_id"], ())) == self.num_receivers
            )
            self.sent.append(body["req_id"])
            return web.json_response(None)
        return web.json_response(sizes)

    async def _receiver(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.shield(self._part(body["req_id"]))
        async with self.fleet.changed:
            self.receivers.setdefault(body["req_id"], set()).add(body["receive_url"])
            self.fleet.changed.notify_all()
        return web.json_response(None)

    async def _metadata(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(await asyncio.shield(self._part(body["req_id"])))

    async def _send(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if not self._part(body["req_id"]).done():
            error = {"message": "the part is not encoded: it cannot be sent", "code": "x"}
            return web.json_response({"error": error}, status=502)
        self.sent.append(body["req_id"])
        return web.json_response({"nbytes": 4 * DIM})


class PeerRefusal(Exception):
    """An encoder slot's error, to be passed on as prefill workers do."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


class FakePrefill(FakeWorker):
    stage = Stage.PREFILL

    def routes(self) -> Any:
        return {"/v1/chat/completions": self._chat}

    async def _chat(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        images = [
            part["image_url"]
            for message in body["messages"]
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for index, image in enumerate(images):
                    group.create_task(self._fetch_embedding(body["rid"], index, image, len(images)))
        except ExceptionGroup as group:
            refusal = group.exceptions[0]
            if not isinstance(refusal, PeerRefusal):
                raise
            return web.json_response(refusal.body, status=refusal.status)
        self.fleet.room(body["bootstrap_room"]).set()
        if self.faults.fail_after_handoff:
            await cut(request)
        return web.json_response({"id": body["rid"]})

    async def _fetch_embedding(
        self, rid: str, index: int, image: dict[str, Any], num_images: int
    ) -> None:
        slots = self.fleet.slots
        slot = self.fleet.coordinator + slots[index % len(slots)]
        req_id = f"{rid}_local_part_{index}"
        encode = {
            "req_id": req_id,
            "part_idx": index,
            "num_parts": num_images,
            "mm_items": [image],
            "modality": "IMAGE",
        }
        where = {"req_id": req_id, "part_idx": index}
        await asyncio.gather(
            self.call_slot(f"{slot}/scheduler_receive_meta_data", where),
            self.call_slot(f"{slot}/encode", encode),
        )
        await self.call_slot(
            f"{slot}/send", {**where, "session_id": "s", "buffer_address": 1, "receive_count": 1}
        )

    async def call_slot(self, url: str, body: dict[str, Any]) -> Any:
        """As SGLang does: without credentials."""
        async with self.fleet.session.post(url, json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise PeerRefusal(response.status, answer)
            return answer


class FakeDecode(FakeWorker):
    stage = Stage.DECODE

    def __init__(self, fleet: Fleet, worker_id: str) -> None:
        super().__init__(fleet, worker_id)
        self.num_tokens = 3
        self.token = "tok"
        self.num_bytes_sent = 0
        self.num_held = 0

    def routes(self) -> Any:
        return {"/v1/chat/completions": self._chat}

    async def _chat(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.fleet.room(body["bootstrap_room"]).wait()
        usage = {"prompt_tokens": 5, "completion_tokens": self.num_tokens, "total_tokens": 8}
        head = {"id": body["rid"], "created": 1, "model": body["model"]}
        if body.get("stream"):
            return await self._stream(request, body, head, usage)
        message = {"role": "assistant", "content": self.token * self.num_tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        if self.faults.cut_whole:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(json.dumps(whole).encode()[:20])
            await cut(request)
        return web.json_response(whole)

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        head: dict[str, Any],
        usage: dict[str, Any],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        faults = self.faults
        chunk = {**head, "object": "chat.completion.chunk"}
        delta: dict[str, Any] = {"role": "assistant", "content": self.token}
        for index in range(self.num_tokens + 1):
            if faults.hold is not None and faults.hold_after == index:
                self.num_held += 1
                async with self.fleet.changed:
                    self.fleet.changed.notify_all()
                await faults.hold.wait()
            if faults.cut_after == index:
                await cut(request)
            if faults.end_after == index:
                return response
            if faults.error_after == index:
                message = "decode is out of memory " * 10
                await response.write(sse({"error": {"message": message, "code": 500}}))
                return response
            if index == self.num_tokens:
                break
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            await self._write(response, sse({**chunk, "choices": [choice]}))
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        await self._write(response, sse({**chunk, "choices": [choice]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._write(response, sse({**chunk, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, event: bytes) -> None:
        await response.write(event)
        self.num_bytes_sent += len(event)


KINDS: dict[Stage, type[FakeWorker]] = {
    Stage.ENCODE: FakeEncode,
    Stage.PREFILL: FakePrefill,
    Stage.DECODE: FakeDecode,
}


@dataclass
class Fleet:
    """All fake workers of a test, and what they share."""

    coordinator: str
    host: str
    token: ClusterToken
    session: aiohttp.ClientSession
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)
    rooms: dict[int, asyncio.Event] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def room(self, room: int) -> asyncio.Event:
        return self.rooms.setdefault(room, asyncio.Event())

    async def add(self, stage: Stage, worker_id: str) -> FakeWorker:
        worker = self.workers[worker_id] = KINDS[stage](self, worker_id)
        await worker.start()
        await worker.register()
        return worker

    def of(self, stage: Stage) -> list[Any]:
        return [worker for worker in self.workers.values() if worker.stage is stage]

    async def until(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Wait until a worker's state makes `condition` true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)


@asynccontextmanager
async def running_fleet(coordinator: str, host: str, token: ClusterToken) -> AsyncIterator[Fleet]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        fleet = Fleet(coordinator, host, token, session)
        try:
            yield fleet
        finally:
            for worker in fleet.workers.values():
                await worker.die()
