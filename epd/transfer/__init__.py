"""The data plane: registered memory, and writes from one worker's memory into another's."""

from epd.transfer.arena import Arena, ArenaStats, Region, RegionCache
from epd.transfer.base import (
    QUARANTINE_S,
    Block,
    OnSettled,
    TransferEngine,
    TransferStats,
)
from epd.transfer.loopback import Fault, FaultKind, LoopbackEngine, LoopbackNetwork
from epd.transfer.memory import HostMemory
from epd.transfer.mooncake import MooncakeEngine, environment
from epd.transfer.waiting_line import WaitingLine

__all__ = [
    "QUARANTINE_S",
    "Arena",
    "ArenaStats",
    "Block",
    "Fault",
    "FaultKind",
    "HostMemory",
    "LoopbackEngine",
    "LoopbackNetwork",
    "MooncakeEngine",
    "OnSettled",
    "Region",
    "RegionCache",
    "TransferEngine",
    "TransferStats",
    "WaitingLine",
    "environment",
]
