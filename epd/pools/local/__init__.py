"""A deployment on this machine: its processes, supervised as one."""

from epd.pools.local.backoff import Backoff
from epd.pools.local.child import Child, ChildSpec
from epd.pools.local.commands import deployment_children, free_port
from epd.pools.local.logs import ConsoleLog, FileLog, Log
from epd.pools.local.readiness import Readiness, watch_until_ready
from epd.pools.local.supervisor import StoppedError, Supervisor

__all__ = [
    "Backoff",
    "Child",
    "ChildSpec",
    "ConsoleLog",
    "FileLog",
    "Log",
    "Readiness",
    "StoppedError",
    "Supervisor",
    "deployment_children",
    "free_port",
    "watch_until_ready",
]
