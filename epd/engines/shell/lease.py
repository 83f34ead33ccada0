"""The worker's lease with the coordinator: one message that registers, keeps alive and reports.

A report goes out every heartbeat, at once on a change of state, and within milliseconds of a
finished span, so that a client's timeline is complete when its answer is. While the coordinator is
down the worker goes on serving and keeps its latest spans.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from epd.engines.shell.peers import PeerClient
from epd.errors import EPDError
from epd.types import Stage, WorkerState
from epd.wire import LeaseGrant, Load, ModelCard, Span, WorkerReport

_log = logging.getLogger(__name__)
_JITTER_RATIO = 0.1
_SEND_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0
_MAX_SPANS = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a worker lives."""

    worker_id: str
    epoch: int
    stage: Stage
    engine: str
    url: str
    model: ModelCard
    bootstrap_port: int | None = None
    pid: int | None = None
    encode_window: int = 8
    can_continue: bool = False
    labels: dict[str, str] = field(default_factory=dict[str, str])


class Lease:
    """Keeps the coordinator informed. `run` is a task of the worker's process."""

    def __init__(
        self,
        identity: Identity,
        *,
        peers: PeerClient,
        coordinator: str,
        state: Callable[[], WorkerState],
        random: Random,
        heartbeat_s: float = 1.0,
        flush_s: float = 0.02,
    ) -> None:
        self.identity = identity
        self.grant: LeaseGrant | None = None
        """The coordinator's latest answer; None until the first."""
        self.load: Callable[[], Load] = Load
        """Where the load comes from; set once there is a stage."""
        self._peers = peers
        self._url = f"{coordinator.rstrip('/')}/internal/workers/{identity.worker_id}"
        self._state = state
        self._random = random
        self._heartbeat_s = heartbeat_s
        self._flush_s = flush_s
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._wake = asyncio.Event()
        self._granted = asyncio.Event()
        self._loss: str | None = None

    def record(self, span: Span) -> None:
        """Send `span` with the next report, which is soon. When spans pile up the oldest go."""
        self._spans.append(span)
        self._wake.set()

    async def wait_grant(self) -> LeaseGrant:
        """The coordinator's latest answer, once there is one."""
        await self._granted.wait()
        assert self.grant is not None, "set together"
        return self.grant

    def notify(self) -> None:
        """Report soon: the state has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self.send()
            await self._pause()

    async def send(self, *, timeout_s: float = _SEND_TIMEOUT_S) -> None:
        """One report with all spans; failures are logged once, then retried by `run`."""
        self._wake.clear()
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        try:
            self.grant = await self._peers.call(
                "PUT",
                self._url,
                LeaseGrant,
                peer="the coordinator",
                message=self._report(spans),
                timeout_s=timeout_s,
            )
        except EPDError as error:
            self._keep(spans)
            self._lost(error)
        except asyncio.CancelledError:
            self._keep(spans)
            raise
        else:
            self._granted.set()
            self._heartbeat_s = self.grant.heartbeat_s
            if self._loss is not None:
                self._loss = None
                _log.info("the coordinator is back")

    async def say_goodbye(self) -> None:
        """The last report, with state gone: do not wait for the lease to lapse."""
        await self.send(timeout_s=_GOODBYE_TIMEOUT_S)

    async def _pause(self) -> None:
        spread = self._heartbeat_s * _JITTER_RATIO
        pause_s = self._heartbeat_s + self._random.uniform(-spread, spread)
        if self._loss is not None:
            # Spans must not make a tight loop of refused connections.
            await asyncio.sleep(pause_s)
            return
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._flush_s)

    def _keep(self, spans: list[Span]) -> None:
        room = _MAX_SPANS - len(self._spans)
        self._spans.extendleft(reversed(spans[max(0, len(spans) - room) :]))

    def _lost(self, error: EPDError) -> None:
        if self._loss != error.message:
            self._loss = error.message
            _log.error("no lease, retrying every %.1f s: %s", self._heartbeat_s, error.message)

    def _report(self, spans: list[Span]) -> WorkerReport:
        me = self.identity
        return WorkerReport(
            worker_id=me.worker_id,
            epoch=me.epoch,
            stage=me.stage,
            engine=me.engine,
            state=self._state(),
            url=me.url,
            bootstrap_port=me.bootstrap_port,
            pid=me.pid,
            encode_window=me.encode_window,
            can_continue=me.can_continue,
            model=me.model,
            labels=me.labels,
            load=self.load(),
            spans=spans,
        )
