"""The coordinator's process: builds its parts, serves HTTP, and takes it all down again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator
from functools import partial
from random import Random

import aiohttp
from aiohttp import web

from epd.addresses import host_port
from epd.api.admin import AdminEndpoints
from epd.api.chat import ChatEndpoint
from epd.api.errors import Handler, errors_middleware
from epd.api.internal import InternalEndpoints
from epd.api.public import PublicEndpoints
from epd.api.writing import finish_within
from epd.auth import CLUSTER, APIKeys, Caller, ClusterToken, load_api_keys, load_token
from epd.background import keep_running
from epd.clock import Clock, SystemClock
from epd.config import CoordinatorConfig
from epd.coordinator.client import WorkerClient
from epd.coordinator.coordinator import Coordinator
from epd.coordinator.fleet import build_watches
from epd.errors import AuthenticationError, ConfigError
from epd.media import HttpFetcher, MediaCache, MediaEdge
from epd.observability.logs import is_no_malformed_request
from epd.observability.metrics import CoordinatorMetrics
from epd.pools.registry import Registry

logger = logging.getLogger(__name__)

_DRAIN_S = 10.0
_SHUTDOWN_S = 2.0
_BACKLOG = 1024  # connections that come in one burst; those over it wait a second or more
# Below the 5 s after which SGLang's servers close an idle connection: a request sent on one that
# is just being closed would be lost, and a POST is not sent twice.
_KEEPALIVE_S = 4.0
OPEN_PATHS = frozenset({"/health", "/ready"})
# Of reports and calls about image parts. Chat requests have limits of their own (`BodyBudget`).
_MAX_MESSAGE_BYTES = 2**20
_CAPABILITY_PATHS = ("/internal/media/", "/internal/encoders/")


@contextlib.asynccontextmanager
async def build_coordinator(
    config: CoordinatorConfig, token: ClusterToken, *, base_url: str, clock: Clock
) -> AsyncGenerator[Coordinator]:
    """Construct the coordinator and own what it uses until the block ends."""
    registry = Registry(clock, lease_s=config.lease.lease_s, breaker=config.breaker)
    metrics = CoordinatorMetrics()
    cache = MediaCache(config.media.cache_bytes)
    edge = MediaEdge(config.media, cache, HttpFetcher(config.media))
    # Deadlines are the dispatcher's; the session only bounds how long a connect may take.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, trust_env=False, auto_decompress=False
    ) as session:
        client = WorkerClient(session, registry, token)
        coordinator = Coordinator(
            config,
            clock=clock,
            registry=registry,
            client=client,
            edge=edge,
            media_cache=cache,
            token=token,
            base_url=base_url,
            metrics=metrics,
            random=Random(config.routing.seed),
        )
        metrics.watch(
            workers=lambda: [(w.stage.value, w.state.value) for w in registry.all()],
            open_breakers=lambda: [
                w.stage.value for w in registry.all() if not w.breaker.is_closed
            ],
            encode_parts=lambda: coordinator.gateway.num_parts,
            media_cache_bytes=lambda: cache.used_bytes,
            body_bytes=lambda: coordinator.bodies.num_bytes,
            queue_lengths=coordinator.admission.queue_lengths,
            backlogs=coordinator.admission.backlogs,
        )
        watches = build_watches(
            config.fleet,
            session=session,
            report=coordinator.take_report,
            clock=clock,
            heartbeat_s=config.lease.heartbeat_s,
            lease_s=config.lease.lease_s,
        )
        expiry = partial(expire_leases, registry, clock, config.lease.heartbeat_s)
        tasks = [
            asyncio.create_task(keep_running("the expiry of leases", expiry)),
            *(asyncio.create_task(keep_running(str(watch), watch.run)) for watch in watches),
        ]
        try:
            yield coordinator
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await edge.close()


def build_app(
    coordinator: Coordinator,
    config: CoordinatorConfig,
    *,
    token: ClusterToken,
    api_keys: APIKeys,
    clock: Clock,
) -> web.Application:
    """The aiohttp application: routes and who may use them."""
    app = web.Application(
        middlewares=[
            finish_within(config.requests.total_s),
            errors_middleware,
            _authentication(token, api_keys),
        ],
        client_max_size=_MAX_MESSAGE_BYTES,
    )
    chat = ChatEndpoint(
        coordinator, lambda authorization: _check_either(authorization, token, api_keys)
    )
    public = PublicEndpoints(coordinator)
    internal = InternalEndpoints(coordinator, config, token)
    admin = AdminEndpoints(coordinator, clock)
    slots = "/internal/encoders/{capability}/{slot}"
    gateway = coordinator.gateway
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat.handle),
            web.get("/v1/models", public.models),
            web.get("/v1/models/{model:.+}", public.model),
            web.get("/health", public.health),
            web.get("/ready", public.ready),
            web.get("/metrics", public.metrics),
            web.get("/admin/workers", admin.workers),
            web.get("/admin/requests/{request_id}", admin.request),
            web.get("/admin/encoder_urls", internal.encoder_urls),
            web.put("/internal/workers/{worker_id}", internal.report),
            web.get("/internal/media/{content_hash}", internal.media),
            web.get(slots + "/health", internal.slot_health),
            web.post(slots + "/encode", internal.slot(gateway.encode)),
            web.post(slots + "/scheduler_receive_meta_data", internal.slot(gateway.metadata)),
            web.post(slots + "/scheduler_receive_url", internal.slot(gateway.receiver)),
            web.post(slots + "/send", internal.slot(gateway.send)),
        ]
    )
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """The server of the application; not yet listening."""
    server_logger = logging.getLogger("epd.api.http")
    server_logger.addFilter(is_no_malformed_request)
    return web.AppRunner(
        app,
        # A client that leaves cancels its handler, and with it every stage of the request.
        handler_cancellation=True,
        access_log=None,
        logger=server_logger,
        shutdown_timeout=_SHUTDOWN_S,
    )


async def run_coordinator(config: CoordinatorConfig, *, parent_pid: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the process `parent_pid` is gone.

    Raises:
        ConfigError: the token, the keys or the port cannot be used.
    """
    clock = SystemClock()
    token = load_token(config.token_file, create=True)
    api_keys = load_api_keys(config.api_keys_file)
    async with build_coordinator(config, token, base_url=config.url, clock=clock) as coordinator:
        app = build_app(coordinator, config, token=token, api_keys=api_keys, clock=clock)
        runner = build_runner(app)
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as exc:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {host_port(config.host, config.port)}: {exc.strerror}. "
                "Choose another --port, or stop what uses it"
            ) from exc
        logger.info("coordinator listens on %s", config.url)
        try:
            await _until_stopped(parent_pid)
        finally:
            # Still listening: what runs needs the encoder slots, and newcomers a clear 503.
            await coordinator.drain(_DRAIN_S)
            await runner.cleanup()


def _authentication(token: ClusterToken, api_keys: APIKeys):
    """Deny by default: a path that is not named here needs the cluster token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        path = request.path
        is_unknown = request.match_info.http_exception is not None  # 404 or 405 follows
        if is_unknown or path in OPEN_PATHS or path.startswith(_CAPABILITY_PATHS):
            pass
        elif path.startswith("/v1/") or path == "/metrics":
            _check_either(authorization, token, api_keys)
        else:
            token.check(authorization)
        return await handler(request)

    return check


def _check_either(authorization: str | None, token: ClusterToken, api_keys: APIKeys) -> Caller:
    try:
        return api_keys.check(authorization)
    except AuthenticationError as exc:
        try:
            token.check(authorization)
        except AuthenticationError:
            raise exc from None
        return CLUSTER


async def expire_leases(registry: Registry, clock: Clock, heartbeat_s: float) -> None:
    """Let leases lapse, except for the time in which this process itself stood still."""
    pause_s = heartbeat_s / 2
    while True:
        began_s = clock.monotonic()
        await asyncio.sleep(pause_s)
        late_s = clock.monotonic() - began_s - pause_s
        if late_s > heartbeat_s:
            logger.warning("this process stood still for %.1f s", late_s)
            registry.forgive(late_s)
        registry.expire()


async def _until_stopped(parent_pid: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    while not stop.is_set():
        if parent_pid is not None and os.getppid() != parent_pid:
            logger.warning("the process that started this coordinator is gone; stopping")
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stop.wait()
