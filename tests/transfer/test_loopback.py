"""The faults that the in-process engine plays on command."""

from __future__ import annotations

import asyncio

import pytest

from epd.errors import TransferError
from epd.transfer import Block, Fault, FaultKind, HostMemory, LoopbackEngine, LoopbackNetwork

CONTENT = b"embedding"


class Pair:
    """A sender holding CONTENT and a receiver holding zeros."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.source = HostMemory(4_096)
        self.destination = HostMemory(4_096)
        self.sender = self.attach("sender", self.source)
        self.receiver = self.attach("receiver", self.destination)
        self.source.view()[: len(CONTENT)] = CONTENT
        self.num_settled = 0

    def attach(self, name: str, memory: HostMemory) -> LoopbackEngine:
        engine = self.network.engine(name)
        engine.register(memory.address, memory.nbytes)
        return engine

    async def write(self, timeout_s: float = 10.0) -> None:
        block = Block(self.source.address, self.destination.address, len(CONTENT))
        await self.sender.write(
            "receiver", [block], timeout_s=timeout_s, on_settled=self._on_settled
        )

    def has_arrived(self) -> bool:
        return bytes(self.destination.view()[: len(CONTENT)]) == CONTENT

    def _on_settled(self) -> None:
        self.num_settled += 1


async def test_a_failed_write_delivers_nothing_and_the_next_one_is_good() -> None:
    pair = Pair()
    pair.network.inject(Fault(FaultKind.FAIL))
    with pytest.raises(TransferError, match="injected"):
        await pair.write()
    assert not pair.has_arrived()
    assert pair.num_settled == 1
    await pair.write()
    assert pair.has_arrived()
    assert (pair.sender.stats.num_failures_total, pair.sender.stats.num_transfers_total) == (1, 1)


async def test_bytes_land_after_a_failure_was_reported() -> None:
    pair = Pair()
    pair.network.inject(Fault(FaultKind.LAND_LATE, 0.05))
    with pytest.raises(TransferError):
        await pair.write()
    assert not pair.has_arrived()
    assert pair.num_settled == 1
    for _ in range(1_000):
        if pair.has_arrived():
            break
        await asyncio.sleep(0.01)
    assert pair.has_arrived()
    assert pair.sender.stats.bytes_moved_total == 0


async def test_a_hang_ends_at_the_deadline_and_settles_when_thawed() -> None:
    pair = Pair()
    pair.network.inject(Fault(FaultKind.HANG))
    with pytest.raises(TransferError, match="not done"):
        await pair.write(timeout_s=0.02)
    assert pair.num_settled == 0
    assert pair.sender.stats.num_in_flight == 1
    pair.network.thaw()
    await asyncio.sleep(0.05)
    assert pair.num_settled == 1
    assert pair.sender.stats.num_in_flight == 0
    assert pair.has_arrived()


async def test_a_delay_within_the_deadline_only_takes_time() -> None:
    pair = Pair()
    pair.network.inject(Fault(FaultKind.DELAY, 0.02))
    await pair.write()
    assert pair.has_arrived()


async def test_a_closed_engine_neither_sends_nor_receives() -> None:
    pair = Pair()
    pair.receiver.close()
    with pytest.raises(TransferError, match="does not answer"):
        await pair.write()
    pair.attach("receiver", pair.destination)
    await pair.write()
    assert pair.has_arrived()
    pair.sender.close()
    with pytest.raises(TransferError, match="closed"):
        await pair.write()
