"""An sglang worker from start to end: check, claim, register, supervise, drain, say goodbye.

The worker serves no requests itself: the coordinator and the other stages talk to its SGLang server
directly. Its own part is the server's life and the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from epd.auth import default_token_file, load_token
from epd.clock import Clock, SystemClock
from epd.config import WorkerConfig
from epd.engines.sglang import probe
from epd.engines.sglang.checkpoint import locate, model_card, read_config
from epd.engines.sglang.environment import compose_environment, encode_window
from epd.engines.sglang.flags import Ports, check_contradictions, compose
from epd.engines.sglang.gpus import claim
from epd.engines.sglang.ports import choose_ports
from epd.engines.sglang.probe import HTTPProbe
from epd.engines.sglang.server import ServerProcess
from epd.engines.sglang.supervision import Supervision
from epd.engines.sglang.versions import check_model, check_version, installed_version
from epd.engines.shell import Identity, Lease, Lifecycle, PeerClient
from epd.types import Stage, WorkerState
from epd.wire import ModelCard

_log = logging.getLogger(__name__)

SERVE = (sys.executable, "-m", "epd.engines.sglang.serve")
OnReady = Callable[[Identity], object]


async def run_sglang_worker(
    config: WorkerConfig,
    *,
    parent_pid: int | None = None,
    on_ready: OnReady | None = None,
    lifecycle: Lifecycle | None = None,
    command: Sequence[str] = SERVE,
    sglang_version: str | None = None,
) -> None:
    """Run an SGLang server under a lease until told to stop, then drain.

    Args:
        config: everything the worker needs to know.
        parent_pid: drain when this is no longer our parent.
        on_ready: called when the server first takes work.
        lifecycle: given, it decides when to stop and no signal handlers are installed.
        command: what is run with the composed flags.
        sglang_version: the version to check; the installed one if not given.

    Raises:
        ConfigError: something in `config` cannot work, or SGLang says so.
        DependencyError: SGLang is not installed.
        WorkerError: the server does not get ready.
    """
    version = check_version(
        sglang_version or installed_version(), allow_untested=config.allow_untested_sglang
    )
    model, folder = locate(config.model)
    check_model(read_config(folder), version)
    check_contradictions(config)
    clock = SystemClock()
    life = lifecycle or Lifecycle()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(claim(config.gpus))
        ports = choose_ports(config)
        card = model_card(
            folder,
            model_id=config.served_model_name or Path(config.model).name,
            context_tokens=config.context_tokens,
        )
        identity = _identity(config, card, ports, clock)
        if lifecycle is None:
            loop = asyncio.get_running_loop()
            life.install_signals(loop)
            stack.callback(life.remove_signals, loop)
        if parent_pid is not None:
            await stack.enter_async_context(_task(life.watch_parent(parent_pid)))
        worker = await stack.enter_async_context(_open(config, identity, life, clock))
        encoder_urls = await worker.encoder_urls()
        if encoder_urls is None:
            return
        argv = compose(
            config,
            model=model,
            served_name=identity.model.model_id,
            ports=ports,
            encoder_urls=encoder_urls,
        )
        _log.info("sglang serve %s", " ".join(argv), extra={"worker_id": identity.worker_id})
        metrics_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-sglang-"))
        environment = compose_environment(config, os.environ, metrics_folder=Path(metrics_folder))
        log = config.server_log or default_log(identity.worker_id)
        await worker.serve(
            lambda: ServerProcess([*command, *argv], environment, log), config, on_ready
        )


class Worker:
    """The lease of a worker and the supervision of its server, tied together."""

    def __init__(
        self,
        identity: Identity,
        lifecycle: Lifecycle,
        clock: Clock,
        session: aiohttp.ClientSession,
        peers: PeerClient,
        coordinator: str,
    ) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._session = session
        self._coordinator = coordinator
        self._supervision: Supervision | None = None
        self.lease = Lease(
            identity,
            peers=peers,
            coordinator=coordinator,
            state=self._state,
            random=Random(identity.epoch),
        )
        lifecycle.on_change(self.lease.notify)

    async def encoder_urls(self) -> list[str] | None:
        """The coordinator's encoder slots, which come with the first lease. Empty but for prefill.

        Returns None if the worker is told to stop before.
        """
        if self.lease.identity.stage is not Stage.PREFILL:
            return []
        granted = asyncio.create_task(self.lease.wait_grant())
        drain = asyncio.create_task(self._lifecycle.wait_drain())
        try:
            await asyncio.wait([granted, drain], return_when=asyncio.FIRST_COMPLETED)
            if not granted.done():
                return None
            return [self._coordinator + path for path in granted.result().encoder_paths]
        finally:
            granted.cancel()
            drain.cancel()

    async def serve(
        self,
        launch: Callable[[], ServerProcess],
        config: WorkerConfig,
        on_ready: OnReady | None,
    ) -> None:
        """From the first start of the server to the end of the drain.

        Raises:
            ConfigError, WorkerError: see `Supervision.run`.
        """
        identity = self.lease.identity
        supervision = self._supervision = Supervision(
            launch,
            HTTPProbe(self._session, identity.url, identity.stage, timeout_s=probe.PROBE_TIMEOUT_S),
            self._clock,
            on_change=self._server_changed,
            start_s=config.start_s,
            stall_s=config.request_timeout_s,
        )
        self.lease.load = lambda: supervision.load
        running = asyncio.create_task(supervision.run())
        ready = asyncio.create_task(supervision.wait_ready())
        drain = asyncio.create_task(self._lifecycle.wait_drain())
        try:
            await asyncio.wait([running, ready, drain], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._lifecycle.move(WorkerState.READY)
                _log.info("ready at %s, serving %s", identity.url, identity.model.model_id)
                if on_ready is not None:
                    on_ready(self.lease.identity)
                await asyncio.wait([running, drain], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                return
            await self._drain(supervision, config.drain_s)
        finally:
            for task in (running, ready, drain):
                task.cancel()
            await asyncio.gather(running, ready, drain, return_exceptions=True)

    async def _drain(self, supervision: Supervision, drain_s: float) -> None:
        if self._lifecycle.state is not WorkerState.READY:
            return
        self._lifecycle.move(WorkerState.DRAINING)
        # Known to the coordinator first: from then on no new request is on its way here.
        await self.lease.send()
        finishing = asyncio.create_task(supervision.drain(drain_s))
        hurry = asyncio.create_task(self._lifecycle.wait_kill())
        await asyncio.wait([finishing, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (finishing, hurry):
            task.cancel()
        await asyncio.gather(finishing, hurry, return_exceptions=True)
        self._lifecycle.move(WorkerState.GONE)

    def _state(self) -> WorkerState:
        state = self._lifecycle.state
        is_serving = self._supervision is not None and self._supervision.is_ready
        if state is WorkerState.READY and not is_serving:
            return WorkerState.STARTING
        return state

    def _server_changed(self) -> None:
        supervision = self._supervision
        if supervision is not None and supervision.pid is None:
            # A new life holds nothing of the last one: what ran there has failed, and the
            # coordinator is to know at once.
            self.lease.identity = replace(self.lease.identity, epoch=int(self._clock.time() * 1e9))
        self.lease.notify()


@contextlib.asynccontextmanager
async def _open(
    config: WorkerConfig, identity: Identity, lifecycle: Lifecycle, clock: Clock
) -> AsyncGenerator[Worker]:
    """The worker under its lease, which is given up at the end."""
    token = load_token(config.token_file)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        peers = PeerClient(session, token)
        worker = Worker(identity, lifecycle, clock, session, peers, config.coordinator)
        try:
            async with _task(worker.lease.run()):
                yield worker
        finally:
            if lifecycle.state is WorkerState.READY:
                lifecycle.move(WorkerState.DRAINING)
            if lifecycle.state is not WorkerState.GONE:
                lifecycle.move(WorkerState.GONE)
            await worker.lease.say_goodbye()


def default_log(worker_id: str) -> Path:
    """Where a server's output goes if the configuration does not say."""
    return default_token_file().parent / "logs" / f"sglang-{worker_id}.log"


def _identity(config: WorkerConfig, card: ModelCard, ports: Ports, clock: Clock) -> Identity:
    host = config.advertised_host
    host = f"[{host}]" if ":" in host else host
    return Identity(
        worker_id=config.worker_id or f"{config.stage}-{secrets.token_hex(4)}",
        epoch=int(clock.time() * 1e9),
        stage=config.stage,
        engine=config.engine,
        url=f"http://{host}:{ports.http}",
        model=card,
        bootstrap_port=ports.bootstrap or None,
        pid=os.getpid(),
        encode_window=encode_window(config),
        labels=config.label,
    )


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """`work` runs in a task while inside; a crash of it is logged when it happens."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Exception):
            _log.error("a task of the worker crashed", exc_info=result)
