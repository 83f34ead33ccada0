"""The process around a stage of work: HTTP server, lease, lifecycle, metrics. Knows no engine."""

from epd.engines.shell.compute import ComputeThread
from epd.engines.shell.lease import Identity, Lease
from epd.engines.shell.lifecycle import Lifecycle
from epd.engines.shell.metrics import WorkerMetrics
from epd.engines.shell.peers import PeerClient
from epd.engines.shell.requests import RequestTable
from epd.engines.shell.server import bind, build_app, serve, wait_idle
from epd.engines.shell.stage import Shell, StageWorker

__all__ = [
    "ComputeThread",
    "Identity",
    "Lease",
    "Lifecycle",
    "PeerClient",
    "RequestTable",
    "Shell",
    "StageWorker",
    "WorkerMetrics",
    "bind",
    "build_app",
    "serve",
    "wait_idle",
]
