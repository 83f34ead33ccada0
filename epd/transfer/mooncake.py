"""Mooncake Transfer Engine behind the seam of `base.py`: RDMA where there is a NIC, TCP otherwise.

Owns the library's engine object, the order of writes per peer, and every precaution the library
needs. Figures in comments: mooncake-transfer-engine-non-cuda 0.3.13.post1, loopback TCP, two
cores, December 2026.

Security: each engine opens two ports on all interfaces, unauthenticated and unencrypted; whoever
reaches them can read and write the registered memory. Pin the ports with `MC_MIN_RPC_PORT` and
`MC_MAX_RPC_PORT` and keep the data network closed to others. A port stays taken for a minute
after its engine ended, so a range needs room for the restarts of a minute.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from epd.addresses import host_port
from epd.errors import ConfigError, DependencyError, TransferError
from epd.own_thread import in_own_thread
from epd.transfer.base import Block, OnSettled, TransferStats
from epd.transfer.batches import plan_batches
from epd.transfer.writes import Flight, Writes

logger = logging.getLogger(__name__)

MooncakeProtocol = Literal["tcp", "rdma"]

_RDMA_DEVICES = Path("/sys/class/infiniband")
_POLL_FIRST_S = 50e-6
_POLL_MAX_S = 2e-3
_FORBIDDEN = {
    "MC_TCP_PROTO": ("1", "it does not acknowledge writes"),
    "MC_TCP_ENABLE_CONNECTION_POOL": ("0", "it exhausts ports under load"),
}


def environment(
    current: Mapping[str, str], *, protocol: MooncakeProtocol = "tcp", host: str = ""
) -> dict[str, str]:
    """The variables to add to `current` before the library is imported; what is set stays.

    `MooncakeEngine` applies it to its own process. Whoever starts another process that uses
    Mooncake (SGLang) merges it into that process's environment. `host` is that process's address.

    Raises:
        ConfigError: `current` holds a setting under which transfers are not reliable.
    """
    for name, (value, reason) in _FORBIDDEN.items():
        if current.get(name) == value:
            raise ConfigError(f"unset {name}={value}: {reason}")
    defaults = {
        "MC_LOG_LEVEL": "ERROR",
        # A peer restarted on its old port is otherwise unreachable for more than 30 s.
        "MC_DISABLE_METACACHE": "1",
        "MC_TRANSFER_TIMEOUT": "5",
        # Ends a batch to a peer that froze half-way, after which its source settles; 30 s else.
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    }
    if protocol == "tcp":
        # `initialize` ignores the protocol's name and takes RDMA where it finds a NIC.
        defaults["MC_FORCE_TCP"] = "1"
    if ":" in host:
        # The library reaches peers by one family only, and that is IPv4 unless it is told.
        defaults["MC_USE_IPV6"] = "1"
    return {name: value for name, value in defaults.items() if name not in current}


class MooncakeEngine:
    """One Mooncake engine of this process. See `TransferEngine` for the contract.

    Each batch of a write is carried by a thread of its own, which submits its blocks and polls
    them with sleeps until the library reports their end. A submit shakes hands and blocks for up
    to 60 s when the peer is frozen, so it can run neither on the event loop nor in a shared pool.
    A peer's lane admits one batch at a time, so there is at most one such thread per peer, and
    never more than `MAX_BATCH_BLOCKS` blocks outstanding.

    Args:
        host: address of this machine as its peers reach it. An IPv6 address lets this process
            reach peers at IPv6 addresses, and no others.
        protocol: `rdma` needs a NIC.
        device: comma-separated RDMA devices; empty for all.

    Raises:
        DependencyError: the package or a system library is missing.
        ConfigError: protocol, device or environment cannot work here.
    """

    def __init__(self, host: str, *, protocol: MooncakeProtocol = "tcp", device: str = "") -> None:
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"transfer protocol {protocol!r}: expected 'tcp' or 'rdma'")
        if protocol == "rdma" and not _has_rdma_device():
            raise ConfigError("transfer protocol 'rdma': no RDMA device here; use 'tcp'")
        os.environ.update(environment(os.environ, protocol=protocol, host=host))
        self._engine = _new_engine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ConfigError(
                f"Mooncake cannot start on {host!r} with {protocol} {device!r}: is it an address "
                "of this machine, and is a port free (MC_MIN_RPC_PORT to MC_MAX_RPC_PORT)?"
            )
        self._session_id = host_port(host, self._engine.get_rpc_port())
        self._writes = Writes()
        self._lanes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._pid = os.getpid()

    @property
    def session_id(self) -> str:
        return self._session_id

    @property
    def stats(self) -> TransferStats:
        return self._writes.stats

    def register(self, address: int, nbytes: int) -> None:
        self._writes.ranges.add(address, nbytes)
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            self._writes.ranges.discard(address)
            raise TransferError(f"Mooncake refused to register {nbytes} bytes: code {code}")

    async def write(
        self,
        session_id: str,
        blocks: Sequence[Block],
        *,
        timeout_s: float,
        on_settled: OnSettled | None = None,
    ) -> None:
        assert os.getpid() == self._pid, "a forked child cannot use its parent's engine"
        deadline = time.monotonic() + timeout_s
        legs = (
            partial(self._launch, session_id, batch, deadline) for batch in plan_batches(blocks)
        )
        await self._writes.run(session_id, blocks, legs, timeout_s=timeout_s, on_settled=on_settled)

    def close(self) -> None:
        if self._writes.is_closed:
            return
        self._writes.is_closed = True
        # The library has no stop; without registered memory it refuses what peers send.
        for address in self._writes.ranges.addresses():
            self._engine.unregister_memory(address)
            self._writes.ranges.discard(address)

    def _lane(self, session_id: str) -> asyncio.Lock:
        """The peer's lock; it is forgotten when no write holds or awaits it."""
        lane = self._lanes.get(session_id)
        if lane is None:
            lane = self._lanes[session_id] = asyncio.Lock()
        return lane

    async def _launch(self, session_id: str, batch: list[Block], deadline: float) -> Flight:
        """Start carrying a batch; the lane is free again when the library is done with it."""
        lane = self._lane(session_id)
        await lane.acquire()
        try:
            flight = in_own_thread(
                lambda: self._carry(session_id, batch, deadline), name=f"transfer-{session_id}"
            )
        except BaseException:
            lane.release()
            raise
        flight.add_done_callback(lambda _: lane.release())
        return flight

    def _carry(self, session_id: str, batch: list[Block], deadline: float) -> str | None:
        """Submit a batch and wait for its end; None if it arrived, otherwise what went wrong.

        Runs in a thread, for up to a minute when the peer is frozen.
        """
        try:
            return self._carry_out(session_id, batch, deadline)
        except Exception as error:
            logger.exception("a batch to %s failed", session_id)
            return repr(error)

    def _carry_out(self, session_id: str, batch: list[Block], deadline: float) -> str | None:
        # First contact inside a submit holds a lock of the whole engine: a frozen peer would stop
        # the writes to all others for 60 s. A probe (85 us) takes the same time without the lock.
        if self._engine.send_probe(session_id) != 0:
            return "the peer does not answer"
        running: list[int] = []
        error = None
        try:
            for block in batch:
                error = self._submit(session_id, block, deadline, running)
                if error is not None:
                    break
        finally:
            # Whatever was submitted is waited for, also after an error: it reads the source.
            num_failed = self._wait(running)
        if (late_s := time.monotonic() - deadline) > 0:
            logger.warning("a batch to %s ended %.1f s after its deadline", session_id, late_s)
        if error is None and num_failed:
            error = f"the peer refused or lost {num_failed} of {len(batch)} blocks"
        return error

    def _submit(
        self, session_id: str, block: Block, deadline: float, running: list[int]
    ) -> str | None:
        """Start one block and note its id; None, or why it was not started.

        One block a call: `transfer_check_status` reports a multi-block id done when its first
        block is (up to 100 % of such writes were read before their bytes had arrived), and the
        library's own wait for such ids spins a core. The cost is the same: 0.14 ms per block.
        """
        if time.monotonic() > deadline:
            return "the deadline passed"
        transfer_id = self._engine.transfer_submit_write(
            session_id, block.source, block.destination, block.nbytes
        )
        # 0 is a failed submit and 2**64 - 1 a peer that could not be opened; asking for the
        # status of either crashes the process.
        if not 0 < transfer_id < 1 << 63:
            return "the peer cannot be reached"
        running.append(transfer_id)
        return None

    def _wait(self, running: list[int]) -> int:
        """Sleep until every id has reached its end; the number of those that failed."""
        num_failed = 0
        for transfer_id in running:
            pause_s = _POLL_FIRST_S
            # 0 and -2 (slow) mean still running; 1 and -1 are final and free the id.
            while (status := self._engine.transfer_check_status(transfer_id)) not in (1, -1):
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _POLL_MAX_S)
            num_failed += status == -1
        return num_failed


def _has_rdma_device() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def _new_engine() -> Any:
    """Import the library and make an engine; says what to install where that fails."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ModuleNotFoundError as error:
        raise DependencyError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda "
            "(on a GPU: mooncake-transfer-engine)"
        ) from error
    except ImportError as error:
        if "libibverbs" in str(error):
            raise DependencyError(
                "Mooncake needs libibverbs, for TCP too: apt-get install libibverbs1"
            ) from error
        raise DependencyError(f"Mooncake cannot be loaded: {error}") from error
