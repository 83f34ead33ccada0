"""Runs one simulated worker from start to end. Called by `epd launch`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp

from epd.auth import load_token
from epd.clock import SystemClock
from epd.config import WorkerConfig
from epd.engines.run import running
from epd.engines.shell import Identity, Lifecycle
from epd.engines.sim.life import Surroundings
from epd.engines.sim.profile import load_profile
from epd.engines.sim.worker import SimWorker
from epd.errors import ConfigError

_log = logging.getLogger(__name__)

# What the other engines are told by an option, and this one by its profile.
_IN_PROFILE = {
    "embedding_bytes": "encode.cache_image_tokens",
    "kv_bytes": "prefill.kv_capacity_tokens and decode.kv_capacity_tokens",
    "max_running_requests": "decode.max_running_requests",
    "chunk_tokens": "prefill.ms_per_uncached_token",
}


async def run_sim_worker(
    config: WorkerConfig,
    *,
    parent_pid: int | None = None,
    on_ready: Callable[[Identity], object] | None = None,
    lifecycle: Lifecycle | None = None,
) -> None:
    """Serve until told to stop (SIGTERM, SIGINT, or `lifecycle.stop`), then drain.

    Args:
        config: everything the worker needs to know; `model` is only a name.
        parent_pid: drain when this is no longer our parent.
        on_ready: called when work is taken.
        lifecycle: given, it decides when to stop and no signal handlers are installed.

    Raises:
        ConfigError: something in `config` or its profile cannot work; one line says what.
    """
    _check(config)
    profile = load_profile(config.profile)
    token = load_token(config.token_file)
    life = lifecycle or Lifecycle()
    async with AsyncExitStack() as stack:
        if lifecycle is None:
            loop = asyncio.get_running_loop()
            life.install_signals(loop)
            stack.callback(life.remove_signals, loop)
        if parent_pid is not None:
            await stack.enter_async_context(running(life.watch_parent(parent_pid)))
        session = await stack.enter_async_context(open_session())
        surroundings = Surroundings(token, session, SystemClock())
        worker = SimWorker(config, profile, surroundings, die=_die)
        await worker.start(life)
        stack.push_async_callback(worker.stop, config.drain_s)
        me = worker.identity
        _log.info(
            "ready at %s, simulating %s",
            me.url,
            me.model.model_id,
            extra={"stage": me.stage, "worker_id": me.worker_id},
        )
        if on_ready is not None:
            on_ready(me)
        await life.wait_drain()


def open_session() -> aiohttp.ClientSession:
    """For calls to peers. Long polls hold connections: a limit on them would be a deadlock."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def _check(config: WorkerConfig) -> None:
    """Refuse settings that would be silently ignored."""
    for name, keys in _IN_PROFILE.items():
        if name in config.model_fields_set:
            raise ConfigError(f"{name} is not read by the sim engine: set {keys} in the profile")


def _die() -> None:
    """What a crash is to the others: no handler runs, no goodbye is said."""
    os.kill(os.getpid(), signal.SIGKILL)
