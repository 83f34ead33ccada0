"""Runs one worker from start to end: build, register, serve, drain, say goodbye.

Called by `epd launch`, and by tests with an engine of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from epd.addresses import http_url
from epd.auth import ClusterToken, load_token
from epd.background import log_crash
from epd.checkpoints import resolve
from epd.clock import Clock, SystemClock
from epd.config import WorkerConfig
from epd.config.sglang import SGLangTuning
from epd.engines.shell import (
    ComputeThread,
    Identity,
    Lease,
    Lifecycle,
    PeerClient,
    RequestTable,
    Shell,
    StageWorker,
    WorkerMetrics,
    bind,
    build_app,
    serve,
    wait_idle,
)
from epd.errors import ConfigError, DependencyError
from epd.transfer import MooncakeEngine, TransferEngine
from epd.types import Stage, WorkerState
from epd.waiting import unless
from epd.wire import ModelCard

_log = logging.getLogger(__name__)

OnReady = Callable[[Identity], object]
"""Called once when the worker is ready for work; its identity has the URL."""


async def run_worker(
    config: WorkerConfig,
    *,
    parent_pid: int | None = None,
    on_ready: OnReady | None = None,
    transfer: TransferEngine | None = None,
    lifecycle: Lifecycle | None = None,
) -> None:
    """Serve until told to stop (SIGTERM, SIGINT, or `lifecycle.stop`), then drain.

    Args:
        config: everything the worker needs to know.
        parent_pid: drain when this is no longer our parent.
        on_ready: called when work is taken.
        transfer: the transfer engine; Mooncake if not given.
        lifecycle: given, it decides when to stop and no signal handlers are installed.

    Raises:
        ConfigError: something in `config` cannot work; one line says what.
        DependencyError: torch or Mooncake is missing.
    """
    _check(config)
    clock = SystemClock()
    token = load_token(config.token_file)
    path = resolve(config.model)
    with contextlib.closing(bind(config.host, config.port)) as listener:
        card = _model_card(config, path)
        async with AsyncExitStack() as stack:
            shell = await stack.enter_async_context(
                _open_shell(config, token, card, listener, clock, lifecycle or Lifecycle())
            )
            if lifecycle is None:
                loop = asyncio.get_running_loop()
                shell.lifecycle.install_signals(loop)
                stack.callback(shell.lifecycle.remove_signals, loop)
            if parent_pid is not None:
                await stack.enter_async_context(running(shell.lifecycle.watch_parent(parent_pid)))
            if transfer is None:
                transfer = _open_transfer(config)
                stack.callback(transfer.close)
            building = _build_stage(config, path, shell, transfer)
            stage = await unless(shell.lifecycle.wait_drain(), building)
            if stage is None:
                return
            stack.push_async_callback(stage.close)
            shell.lease.load = stage.load
            await _serve(config, shell, stage, listener, on_ready)


def _check(config: WorkerConfig) -> None:
    for name in SGLangTuning.model_fields:
        if name in config.model_fields_set and getattr(config, name) != _default(name):
            hint = ": device cuda:0 puts a worker of it on a GPU" if name == "gpus" else ""
            raise ConfigError(f"{name} is a setting of the sglang engine, not of torch{hint}")


def _default(name: str) -> object:
    return SGLangTuning.model_fields[name].default


def _model_card(config: WorkerConfig, path: Path) -> ModelCard:
    try:
        from epd.engines.torch.build import model_card
    except ModuleNotFoundError as exc:
        raise DependencyError(
            f"the torch engine needs {exc.name}: pip install '.[torch]' in a clone of EPD"
        ) from exc
    return model_card(config, path)


async def _build_stage(
    config: WorkerConfig, path: Path, shell: Shell, transfer: TransferEngine
) -> StageWorker:
    from epd.engines.torch.build import build_stage

    return await build_stage(config, path, shell, transfer)


def _open_transfer(config: WorkerConfig) -> TransferEngine:
    return MooncakeEngine(
        config.advertised_host, protocol=config.transfer_protocol, device=config.transfer_device
    )


async def _serve(
    config: WorkerConfig,
    shell: Shell,
    stage: StageWorker,
    listener: socket.socket,
    on_ready: OnReady | None,
) -> None:
    """From ready to gone."""
    lifecycle = shell.lifecycle
    app = build_app(shell, stage, stall_s=config.request_timeout_s)
    runner = await serve(app, listener)
    try:
        lifecycle.move(WorkerState.READY)
        _log.info(
            "ready at %s, serving %s",
            shell.identity.url,
            shell.identity.model.model_id,
            extra={"stage": shell.identity.stage, "worker_id": shell.identity.worker_id},
        )
        if on_ready is not None:
            on_ready(shell.identity)
        await lifecycle.wait_drain()
        lifecycle.move(WorkerState.DRAINING)
        await drain(shell, stage, config.drain_s)
        lifecycle.move(WorkerState.GONE)
    finally:
        shell.requests.abort_all()
        await runner.cleanup()


async def drain(shell: Shell, stage: StageWorker, drain_s: float) -> None:
    """Finish what runs, unless that takes too long or a second signal comes."""
    try:
        async with asyncio.timeout(drain_s):
            await unless(shell.lifecycle.wait_kill(), wait_idle(shell, stage))
    except TimeoutError:
        _log.warning("%d requests were not finished in drain_s", len(shell.requests))


@asynccontextmanager
async def _open_shell(
    config: WorkerConfig,
    token: ClusterToken,
    card: ModelCard,
    listener: socket.socket,
    clock: Clock,
    lifecycle: Lifecycle,
) -> AsyncGenerator[Shell]:
    """The process's services; the lease is kept while inside, and given up at the end."""
    identity = identity_of(config, card, listener, clock)
    # Long polls hold connections: any limit on their number would be a deadlock.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        peers = PeerClient(session, token)
        lease = Lease(
            identity,
            peers=peers,
            coordinator=config.coordinator,
            state=lambda: lifecycle.state,
            random=Random(identity.epoch),
        )
        lifecycle.on_change(lease.notify)
        compute = ComputeThread(clock)
        shell = Shell(
            identity=identity,
            token=token,
            coordinator=config.coordinator,
            clock=clock,
            compute=compute,
            peers=peers,
            requests=RequestTable(clock),
            lifecycle=lifecycle,
            lease=lease,
            metrics=WorkerMetrics(CollectorRegistry()),
        )
        try:
            async with running(lease.run()):
                yield shell
        finally:
            compute.close()
            if lifecycle.state is not WorkerState.GONE:
                lifecycle.move(WorkerState.GONE)
            await lease.say_goodbye()


def identity_of(
    config: WorkerConfig, card: ModelCard, listener: socket.socket, clock: Clock
) -> Identity:
    """Who the worker is, with a new epoch; a made-up name if the configuration gives none."""
    port: int = listener.getsockname()[1]
    return Identity(
        worker_id=config.worker_id or f"{config.stage}-{secrets.token_hex(4)}",
        epoch=int(clock.time() * 1e9),
        stage=config.stage,
        engine=config.engine,
        url=http_url(config.advertised_host, port),
        model=card,
        # Rooms are served by the same server as everything else.
        bootstrap_port=port if config.stage is Stage.PREFILL else None,
        pid=os.getpid(),
        can_continue=config.stage is not Stage.ENCODE,
        labels=config.label,
    )


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """`work` runs in a task while inside; a crash of it is logged when it happens."""
    task = asyncio.create_task(work, name=work.__qualname__)
    task.add_done_callback(log_crash)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
