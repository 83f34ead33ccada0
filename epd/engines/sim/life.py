"""One life of a simulated worker, from its start to its end: what its process would hold."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, replace
from random import Random

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from yarl import URL

from epd.auth import ClusterToken
from epd.background import log_crash
from epd.clock import Clock
from epd.config import WorkerConfig
from epd.engines.contract.context_limits import ContextLimits
from epd.engines.run import identity_of
from epd.engines.shell import (
    ComputeThread,
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
)
from epd.engines.sim.decode_worker import SimDecodeWorker
from epd.engines.sim.encode_worker import SimEncodeWorker
from epd.engines.sim.faults import FaultEndpoints, Faults
from epd.engines.sim.pace import Pace, Sleep
from epd.engines.sim.prefill_worker import SimPrefillWorker
from epd.engines.sim.profile import Profile
from epd.types import Stage, WorkerState
from epd.wire import ModelCard


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker shares with others, and what outlives it."""

    token: ClusterToken
    session: aiohttp.ClientSession
    """For calls to peers."""
    clock: Clock
    sleep: Sleep = asyncio.sleep
    """Waits for seconds of `clock`."""


@dataclass(slots=True, eq=False)
class Life:
    """Server, lease and stage of a worker that is up."""

    shell: Shell
    stage: StageWorker
    runner: web.AppRunner
    listener: socket.socket
    lease: asyncio.Task[None]

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, or would if it did not refuse connections."""
        url = URL(self.shell.identity.url)
        assert url.host is not None and url.port is not None, "a worker's URL names both"
        return url.host, url.port

    async def end(self) -> None:
        """Stop serving and reporting. Nobody is told."""
        self.lease.cancel()
        self.shell.requests.abort_all()
        await self.close_listener()
        await self.runner.cleanup()
        await self.stage.close()
        self.shell.compute.close()
        await asyncio.gather(self.lease, return_exceptions=True)

    def break_connections(self) -> None:
        """As the kernel does when a process dies."""
        self.lease.cancel()
        for transport in self._transports():
            transport.abort()

    async def close_listener(self) -> None:
        """New connections are refused; those that are there stay."""
        if self.listener.fileno() < 0:
            return
        # A connection that asyncio has accepted and not yet set up would be lost, and warned of, if
        # its server were closed now.
        asyncio.get_running_loop().remove_reader(self.listener)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for site in list(self.runner.sites):
            await site.stop()

    def close_idle_connections(self) -> None:
        """Close each connection once no request runs on it."""
        if self.runner.server is not None:
            self.runner.server.pre_shutdown()

    def _transports(self) -> list[asyncio.Transport]:
        connections = self.runner.server.connections if self.runner.server is not None else []
        return [c.transport for c in connections if isinstance(c.transport, asyncio.Transport)]


async def begin_life(
    config: WorkerConfig,
    profile: Profile,
    surroundings: Surroundings,
    faults: Faults,
    lifecycle: Lifecycle,
) -> Life:
    """Listen, register and take work.

    Raises:
        ConfigError: the address cannot be used.
    """
    listener = bind(config.host, config.port)
    shell = _open_shell(config, profile, surroundings, listener, lifecycle)
    stage = _build_stage(config, profile, surroundings, faults, shell)
    shell.lease.load = stage.load
    app = build_app(shell, stage, stall_s=config.request_timeout_s)
    # Innermost: a fault comes after the check of the token, and its error becomes an answer.
    app.middlewares.append(faults.middleware())
    app.add_routes(FaultEndpoints(faults).routes())
    runner = await serve(app, listener)
    lifecycle.move(WorkerState.READY)
    lease = asyncio.create_task(shell.lease.run(), name=f"lease of {shell.identity.worker_id}")
    lease.add_done_callback(log_crash)
    return Life(shell, stage, runner, listener, lease)


def _open_shell(
    config: WorkerConfig,
    profile: Profile,
    surroundings: Surroundings,
    listener: socket.socket,
    lifecycle: Lifecycle,
) -> Shell:
    clock = surroundings.clock
    card = ModelCard(
        model_id=config.served_model_name or config.model.rsplit("/", 1)[-1],
        model_type=profile.model.model_type,
        context_tokens=_context_tokens(config, profile),
        image_budget=profile.model.image_budget,
    )
    identity = replace(
        identity_of(config, card, listener, clock), encode_window=profile.encode.window
    )
    peers = PeerClient(surroundings.session, surroundings.token)
    lease = Lease(
        identity,
        peers=peers,
        coordinator=config.coordinator,
        state=lambda: lifecycle.state,
        random=Random(identity.epoch),
    )
    lifecycle.on_change(lease.notify)
    return Shell(
        identity=identity,
        token=surroundings.token,
        coordinator=config.coordinator,
        clock=clock,
        compute=ComputeThread(clock),  # makes no thread before it has a job, and gets none
        peers=peers,
        requests=RequestTable(clock),
        lifecycle=lifecycle,
        lease=lease,
        metrics=WorkerMetrics(CollectorRegistry()),
    )


def _build_stage(
    config: WorkerConfig,
    profile: Profile,
    surroundings: Surroundings,
    faults: Faults,
    shell: Shell,
) -> StageWorker:
    pace = Pace(
        surroundings.clock,
        sleep=surroundings.sleep,
        time_scale=profile.time_scale,
        jitter_ratio=profile.jitter_ratio,
        random=Random(f"{profile.seed} {shell.identity.worker_id}"),
    )
    limits = ContextLimits(_context_tokens(config, profile), profile.answer.default_max_tokens)
    timeout_s = config.request_timeout_s
    if config.stage is Stage.ENCODE:
        return SimEncodeWorker(shell, profile, pace, faults, timeout_s=timeout_s)
    kind = SimPrefillWorker if config.stage is Stage.PREFILL else SimDecodeWorker
    return kind(shell, profile, pace, faults, limits=limits, timeout_s=timeout_s)


def _context_tokens(config: WorkerConfig, profile: Profile) -> int:
    """The profile's limit or the operator's, and never more than either KV cache can hold."""
    block_tokens = profile.model.block_tokens
    return min(
        config.context_tokens or profile.model.context_tokens,
        profile.model.context_tokens,
        profile.prefill.kv_capacity_tokens // block_tokens * block_tokens,
        profile.decode.kv_capacity_tokens // block_tokens * block_tokens,
    )
