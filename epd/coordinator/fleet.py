"""Existing SGLang servers under this coordinator, which reports for them as workers do themselves.

A server is asked every heartbeat. While it answers and moves, a report in its name keeps its lease;
when it does not, the lease lapses as that of a dead worker does. Nothing here starts or stops one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from yarl import URL

from epd.clock import Clock
from epd.config import ExistingServer
from epd.engines.sglang.checkpoint import locate, model_card
from epd.engines.sglang.health import Progress
from epd.engines.sglang.probe import HTTPProbe, Probe
from epd.types import Stage, WorkerState
from epd.wire import Load, ModelCard, WorkerReport

logger = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 3.0

Report = Callable[[WorkerReport], None]


class ServerWatch:
    """Watches one server and reports for it.

    Args:
        server: what the operator says of it.
        card: its model.
        probe: asks the server.
        report: takes a report, as the registry does.
        clock: measures silences and dates lives.
        heartbeat_s: pause between two questions.
        lease_s: after so long without a report the coordinator has given it up.
    """

    def __init__(
        self,
        server: ExistingServer,
        card: ModelCard,
        probe: Probe,
        report: Report,
        clock: Clock,
        *,
        heartbeat_s: float,
        lease_s: float,
    ) -> None:
        self._server = server
        self._card = card
        self._probe = probe
        self._report = report
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._progress: Progress | None = None
        self._epoch = 0
        self._reported_s = float("-inf")

    def __str__(self) -> str:
        return f"the watch of {self._server.url}"

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._heartbeat_s)

    async def look(self) -> None:
        """Ask once, and report unless there is nothing good to say."""
        is_new_life = self._clock.monotonic() - self._reported_s > self._lease_s
        # It may have been started anew, and answer before it can work.
        if is_new_life and not await self._probe.is_ready():
            return
        answered, body = await self._probe.ask()
        now_s = self._clock.monotonic()
        if self._progress is None:
            self._progress = Progress(self._server.stall_s, now_s, Load())
        if not answered:
            self._progress.silent(now_s)
            return
        self._progress.answered(body, now_s)
        if self._progress.fault is not None:
            return
        if is_new_life:
            # What ran there before has been failed.
            self._epoch = int(self._clock.time() * 1e9)
        self._reported_s = now_s
        self._report(self._message(self._progress.load))

    def _message(self, load: Load) -> WorkerReport:
        server = self._server
        url = URL(server.url)
        return WorkerReport(
            worker_id=f"{server.stage}-{url.host}-{url.port}",
            epoch=self._epoch,
            stage=server.stage,
            engine="sglang",
            state=WorkerState.READY,
            url=server.url,
            bootstrap_port=server.bootstrap_port if server.stage is Stage.PREFILL else None,
            encode_window=server.encode_window,
            model=self._card,
            labels={"managed_by": "others", **server.labels},
            load=load,
        )


def build_watches(
    servers: Sequence[ExistingServer],
    *,
    session: aiohttp.ClientSession,
    report: Report,
    clock: Clock,
    heartbeat_s: float,
    lease_s: float,
) -> list[ServerWatch]:
    """A watch for each server of the configuration.

    Raises:
        ConfigError: a server's model is not to be found here.
    """
    return [
        ServerWatch(
            server,
            _card(server),
            HTTPProbe(session, server.url, server.stage, timeout_s=_PROBE_TIMEOUT_S),
            report,
            clock,
            heartbeat_s=heartbeat_s,
            lease_s=lease_s,
        )
        for server in servers
    ]


def _card(server: ExistingServer) -> ModelCard:
    _, folder = locate(server.model)
    return model_card(folder, model_id=server.served_model_name or Path(server.model).name)
