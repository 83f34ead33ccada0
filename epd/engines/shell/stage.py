"""What the shell asks of the stage it serves, and what it offers to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aiohttp import web

from epd.auth import ClusterToken
from epd.clock import Clock
from epd.engines.shell.compute import ComputeThread
from epd.engines.shell.lease import Identity, Lease
from epd.engines.shell.lifecycle import Lifecycle
from epd.engines.shell.metrics import WorkerMetrics
from epd.engines.shell.peers import PeerClient
from epd.engines.shell.requests import RequestTable
from epd.wire import Load, Span

SpanName = Literal["fetch", "encode", "embedding_handoff", "prefill", "kv_handoff", "decode"]


class StageWorker(Protocol):
    """The work of one stage behind the shell's HTTP server.

    To be derived from: a stage that holds nothing beyond its running handlers, which the shell
    cancels and waits for, needs no `abort` and no `wait_idle`.
    """

    def routes(self) -> list[web.RouteDef]:
        """The stage's own endpoints; those every worker has come from the shell."""
        ...

    def load(self) -> Load:
        """Cheap: called for each heartbeat."""
        ...

    def abort(self, rid: str) -> None:
        """Release what `rid` holds beyond its running handlers."""

    async def wait_idle(self) -> None:
        """Return when nothing is held beyond running handlers."""

    def describe(self) -> dict[str, Any]:
        """The stage's part of `/server_info`."""
        ...

    async def close(self) -> None:
        """Stop tasks and give up memory. Called once, after the last handler."""
        ...


@dataclass(frozen=True, slots=True)
class Shell:
    """The services a stage finds in its process."""

    identity: Identity
    token: ClusterToken
    coordinator: str
    clock: Clock
    compute: ComputeThread
    peers: PeerClient
    requests: RequestTable
    lifecycle: Lifecycle
    lease: Lease
    metrics: WorkerMetrics

    def span(
        self, rid: str, name: SpanName, began_s: float, *, nbytes: int = 0, num_tokens: int = 0
    ) -> None:
        """Report that the step `name` of request `rid` ran from `began_s` (monotonic) to now."""
        duration_s = self.clock.monotonic() - began_s
        self.lease.record(
            Span(
                request_id=rid,
                name=name,
                start_unix_s=self.clock.time() - duration_s,
                duration_s=duration_s,
                nbytes=nbytes,
                num_tokens=num_tokens,
            )
        )
