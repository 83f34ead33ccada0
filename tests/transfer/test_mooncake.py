"""What only the real library can get wrong: processes that die, freeze or restart."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from epd.errors import ConfigError, DependencyError, TransferError
from epd.transfer import Block, MooncakeEngine, environment
from tests.transfer.peers import MooncakePeer, Sender
from tests.transfer.test_contract import TIMEOUT_S, blocks_between, holds

STALL_S = 0.5
"""More than a noisy machine adds to a tick, less than any blocking call of the library (>= 1 s)."""


@asynccontextmanager
async def responsive_loop() -> AsyncIterator[None]:
    """Fails when the event loop was blocked inside the block."""
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - before)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
    assert longest_s < STALL_S


def start_peer(sender: Sender) -> MooncakePeer:
    peer = sender.new_peer()
    assert isinstance(peer, MooncakePeer)
    return peer


def long_write(sender: Sender, peer: MooncakePeer) -> list[Block]:
    """4 GB: the same 64 MB over and over, so that a fault strikes in the middle."""
    return blocks_between(sender, peer, nbytes=64 << 20) * 64


async def until_bytes_arrive(peer: MooncakePeer) -> None:
    empty = hashlib.sha256(bytes(4_096)).hexdigest()
    for _ in range(1_000):
        if await asyncio.to_thread(peer.digest, 0, 4_096) != empty:
            return
        await asyncio.sleep(0.005)
    pytest.fail("no byte arrived")


async def test_a_peer_killed_midway_is_an_error_and_the_loop_goes_on(mooncake: Sender) -> None:
    peer = start_peer(mooncake)
    settled = asyncio.Event()
    async with responsive_loop():
        write = asyncio.create_task(
            mooncake.engine.write(
                peer.session_id,
                long_write(mooncake, peer),
                timeout_s=TIMEOUT_S,
                on_settled=settled.set,
            )
        )
        await until_bytes_arrive(peer)
        peer.kill()
        with pytest.raises(TransferError):
            await write
        async with asyncio.timeout(TIMEOUT_S):
            await settled.wait()
    assert mooncake.engine.stats.num_in_flight == 0


async def test_a_peer_frozen_midway_meets_the_deadline_and_pins_the_source(
    mooncake: Sender,
) -> None:
    peer = start_peer(mooncake)
    settled = asyncio.Event()
    async with responsive_loop():
        write = asyncio.create_task(
            mooncake.engine.write(
                peer.session_id,
                long_write(mooncake, peer),
                timeout_s=2.0,
                on_settled=settled.set,
            )
        )
        await until_bytes_arrive(peer)
        peer.freeze()
        with pytest.raises(TransferError):
            await write
        assert not settled.is_set()
        peer.thaw()
        async with asyncio.timeout(TIMEOUT_S):
            await settled.wait()
    blocks = blocks_between(mooncake, peer, nbytes=1_000)
    await mooncake.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
    assert holds(mooncake, peer, blocks)


async def test_a_frozen_peer_never_met_before_stops_no_other_peer(mooncake: Sender) -> None:
    frozen, other, unmet = (start_peer(mooncake) for _ in range(3))
    blocks = blocks_between(mooncake, other, nbytes=1_000)
    await mooncake.engine.write(other.session_id, blocks, timeout_s=TIMEOUT_S)
    frozen.freeze()
    stuck_settled = asyncio.Event()
    async with responsive_loop():
        stuck = asyncio.create_task(
            mooncake.engine.write(
                frozen.session_id,
                blocks_between(mooncake, frozen, nbytes=1_000),
                timeout_s=3.0,
                on_settled=stuck_settled.set,
            )
        )
        await asyncio.sleep(0.2)
        for peer in (other, unmet):
            blocks = blocks_between(mooncake, peer, nbytes=2_000, offset=5_000)
            await mooncake.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
            assert holds(mooncake, peer, blocks)
        assert not stuck.done()
        queued: list[bool] = []
        with pytest.raises(TransferError, match="not done"):
            await mooncake.engine.write(
                frozen.session_id,
                blocks_between(mooncake, frozen, nbytes=1_000),
                timeout_s=0.2,
                on_settled=lambda: queued.append(True),
            )
        # It never left the queue, so nothing reads its source.
        assert queued == [True]
        with pytest.raises(TransferError, match="not done"):
            await stuck
        frozen.thaw()
        async with asyncio.timeout(TIMEOUT_S):
            await stuck_settled.wait()
    blocks = blocks_between(mooncake, frozen, nbytes=1_000)
    await mooncake.engine.write(frozen.session_id, blocks, timeout_s=TIMEOUT_S)
    assert holds(mooncake, frozen, blocks)


async def test_completion_means_that_every_byte_has_arrived(mooncake: Sender) -> None:
    peer = start_peer(mooncake)
    for number in range(10):
        blocks = blocks_between(mooncake, peer, nbytes=500_000, count=8, gap=8, offset=number)
        await mooncake.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
        assert holds(mooncake, peer, blocks)


async def test_no_peer_at_that_address_is_an_error(mooncake: Sender) -> None:
    block = Block(mooncake.memory.address, 4_096, 64)
    for session_id in ("127.0.0.1:1", "no-such-host.invalid:15000"):
        with pytest.raises(TransferError, match="does not answer"):
            await mooncake.engine.write(session_id, [block], timeout_s=TIMEOUT_S)


def test_the_environment_keeps_what_the_operator_set() -> None:
    added = environment({"MC_TRANSFER_TIMEOUT": "9"})
    assert "MC_TRANSFER_TIMEOUT" not in added
    assert added["MC_DISABLE_METACACHE"] == "1"
    assert added["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in environment({}, protocol="rdma")
    assert "MC_USE_IPV6" not in environment({}, host="10.0.0.7")
    assert environment({}, host="fd00::7")["MC_USE_IPV6"] == "1"


@pytest.mark.parametrize(
    ("name", "value"), [("MC_TCP_PROTO", "1"), ("MC_TCP_ENABLE_CONNECTION_POOL", "0")]
)
def test_unreliable_settings_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        environment({name: value})


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 on this machine")
def test_bytes_move_between_ipv6_addresses() -> None:
    # In a process of its own: the family is a matter of the whole process.
    code = """
import asyncio
from epd.transfer import Block, HostMemory, MooncakeEngine

async def main():
    sender, receiver = MooncakeEngine("::1"), MooncakeEngine("::1")
    source, destination = HostMemory(4096), HostMemory(4096)
    sender.register(source.address, 4096)
    receiver.register(destination.address, 4096)
    source.view()[:5] = b"hello"
    block = Block(source.address, destination.address, 4096)
    await sender.write(receiver.session_id, [block], timeout_s=15)
    print(receiver.session_id.rpartition(":")[0], bytes(destination.view()[:5]))

asyncio.run(main())
"""
    pytest.importorskip("mooncake.engine")
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[::1] b'hello'"


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpc'"):
        MooncakeEngine("127.0.0.1", protocol="tpc")


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.transfer.mooncake._has_rdma_device", lambda: False)
    with pytest.raises(ConfigError, match="use 'tcp'"):
        MooncakeEngine("127.0.0.1", protocol="rdma")


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install"),
        (ImportError("libibverbs.so.1: cannot open shared object"), "apt-get install libibverbs1"),
        (ImportError("libcudart.so.12: cannot open shared object"), "libcudart"),
    ],
)
def test_a_missing_dependency_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, failure: ImportError, advice: str
) -> None:
    def fail(name: str) -> None:
        raise failure

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(DependencyError, match=advice):
        MooncakeEngine("127.0.0.1")


def test_the_package_imports_neither_torch_nor_mooncake() -> None:
    code = "import sys, epd.transfer; print([m for m in ('torch', 'mooncake') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
