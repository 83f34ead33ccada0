"""The HTTP server of a worker: the endpoints every stage has, in SGLang's shapes."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from epd import __version__
from epd.engines.shell.middleware import answer_errors, require_token
from epd.engines.shell.stage import Shell, StageWorker
from epd.errors import ConfigError, OverloadedError
from epd.types import WorkerState
from epd.wire import AbortRequest
from epd.wire.parsing import parse

_MAX_BODY_BYTES = 64 * 2**20
_BACKLOG = 1024
_SHUTDOWN_S = 2.0


_ADVICE = "choose another with --port, or 0 for a free one"


def bind(host: str, port: int, *, advice: str = _ADVICE) -> socket.socket:
    """A listening socket; taken before the model loads, so that a clash is found at once.

    Args:
        host: address of this machine to listen at.
        port: 0 takes a free one.
        advice: what to do about a port in use, for the error.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: {advice}") from exc
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    listener.setblocking(False)
    return listener


class CommonEndpoints:
    """Liveness, readiness, load, information, metrics and abort."""

    def __init__(self, shell: Shell, stage: StageWorker, *, stall_s: float) -> None:
        self._shell = shell
        self._stage = stage
        self._stall_s = stall_s

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/v1/models", self.models),
            web.get("/metrics", self.metrics),
            web.post("/abort_request", self.abort_request),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """Liveness: the loop answers, and the compute thread has not been stuck in one job."""
        busy_s = self._shell.compute.busy_s()
        if busy_s > self._stall_s:
            raise OverloadedError(f"one computation has been running for {busy_s:.0f} s")
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        self._shell.lifecycle.check_accepts_work()
        return web.json_response({"status": WorkerState.READY})

    async def server_info(self, request: web.Request) -> web.Response:
        me = self._shell.identity
        return web.json_response(
            {
                "version": __version__,
                "worker_id": me.worker_id,
                "epoch": me.epoch,
                "stage": me.stage,
                "engine": me.engine,
                "state": self._shell.lifecycle.state,
                "pid": me.pid,
                "can_continue": me.can_continue,
                "model": me.model.model_dump(),
                **self._stage.describe(),
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        load = self._stage.load().model_dump()
        return web.json_response({"loads": [{"dp_rank": 0, **load}], "timestamp": time.time()})

    async def models(self, request: web.Request) -> web.Response:
        me = self._shell.identity
        card = {
            "id": me.model.model_id,
            "object": "model",
            "created": me.epoch // 1_000_000_000,
            "owned_by": "epd",
            "max_model_len": me.model.context_tokens,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._shell.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def abort_request(self, request: web.Request) -> web.Response:
        """Always 200, known rid or not: the wish is fulfilled either way."""
        rid = parse(AbortRequest, await request.read()).rid
        num_aborted = self._shell.requests.abort(rid)
        self._stage.abort(rid)
        return web.json_response({"rid": rid, "num_aborted": num_aborted})


def build_app(shell: Shell, stage: StageWorker, *, stall_s: float) -> web.Application:
    """The application of one worker.

    Args:
        shell: the process's services.
        stage: the work behind the server.
        stall_s: one computation running for longer than this makes `/health` fail.
    """
    shell.metrics.gauge(
        "epd_requests_running", "Requests being worked on", lambda: len(shell.requests)
    )
    app = web.Application(
        middlewares=[answer_errors, require_token(shell.token)], client_max_size=_MAX_BODY_BYTES
    )
    app.add_routes(CommonEndpoints(shell, stage, stall_s=stall_s).routes())
    app.add_routes(stage.routes())
    return app


async def serve(app: web.Application, listener: socket.socket) -> web.AppRunner:
    """Begin to serve; `cleanup` of the returned runner ends it and closes the socket.

    A handler is cancelled when its peer leaves: that is how a request's memory comes back when
    its client has gone.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner


async def wait_idle(shell: Shell, stage: StageWorker) -> None:
    """Return when no handler runs and the stage holds nothing for a peer."""
    while True:
        await shell.requests.wait_idle()
        await stage.wait_idle()
        await asyncio.sleep(0)
        if not len(shell.requests):
            return
