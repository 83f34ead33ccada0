"""What every TransferEngine promises, asked of the fake and of the real library alike."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from epd.errors import TransferError
from epd.transfer import Block
from tests.transfer.peers import Peer, Sender

TIMEOUT_S = 30.0


def blocks_between(
    sender: Sender, peer: Peer, *, nbytes: int, count: int = 1, gap: int = 0, offset: int = 0
) -> list[Block]:
    """`count` blocks at equal offsets on both sides, `gap` bytes apart."""
    starts = [offset + number * (nbytes + gap) for number in range(count)]
    return [Block(sender.memory.address + at, peer.address + at, nbytes) for at in starts]


def digest(sender: Sender, offset: int, nbytes: int) -> str:
    with sender.memory.view() as view:
        return hashlib.sha256(view[offset : offset + nbytes]).hexdigest()


def holds(sender: Sender, peer: Peer, blocks: list[Block]) -> bool:
    """Whether the peer has the sender's bytes in every block (equal offsets on both sides)."""
    ranges = [(block.source - sender.memory.address, block.nbytes) for block in blocks]
    return all(peer.digest(*pair) == digest(sender, *pair) for pair in ranges)


@pytest.mark.parametrize(
    ("nbytes", "count", "gap", "offset"),
    [
        (1, 1, 0, 0),
        (1, 1, 0, 12_345),
        (4_097, 3, 13, 7),
        (4_096, 300, 0, 0),
        (4_096, 300, 64, 0),
        (512, 3_000, 8, 0),
        ((4 << 20) + 1, 3, 1, 1),
        (64 << 20, 1, 0, 0),
    ],
)
async def test_bytes_arrive_equal(
    sender: Sender, nbytes: int, count: int, gap: int, offset: int
) -> None:
    peer = sender.new_peer()
    before = sender.engine.stats.bytes_moved_total
    blocks = blocks_between(sender, peer, nbytes=nbytes, count=count, gap=gap, offset=offset)
    await sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
    assert holds(sender, peer, blocks)
    assert sender.engine.stats.bytes_moved_total - before == nbytes * count
    assert sender.engine.stats.num_in_flight == 0


async def test_bytes_next_to_a_block_are_left_alone(sender: Sender) -> None:
    peer = sender.new_peer()
    zeros = peer.digest(0, 100)
    blocks = blocks_between(sender, peer, nbytes=50, offset=100)
    await sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
    assert peer.digest(0, 100) == zeros
    assert peer.digest(150, 100) == zeros


async def test_a_write_of_nothing_succeeds(sender: Sender) -> None:
    peer = sender.new_peer()
    settled: list[bool] = []
    await sender.engine.write(
        peer.session_id, [], timeout_s=TIMEOUT_S, on_settled=lambda: settled.append(True)
    )
    assert settled == [True]


async def test_concurrent_writes_to_the_same_and_to_different_peers(sender: Sender) -> None:
    peers = [sender.new_peer(), sender.new_peer()]
    writes = [
        (peer, blocks_between(sender, peer, nbytes=70_001, count=4, gap=3, offset=number << 20))
        for peer in peers
        for number in range(8)
    ]
    async with asyncio.TaskGroup() as group:
        for peer, blocks in writes:
            group.create_task(sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S))
    assert all(holds(sender, peer, blocks) for peer, blocks in writes)


async def test_a_source_outside_registered_memory_is_refused_before_anything_moves(
    sender: Sender,
) -> None:
    peer = sender.new_peer()
    zeros = peer.digest(0, 64)
    end = sender.memory.address + sender.memory.nbytes
    good = Block(sender.memory.address, peer.address, 64)
    for bad in (Block(end - 63, peer.address, 64), Block(end, peer.address, 1)):
        settled: list[bool] = []
        with pytest.raises(TransferError, match="not in registered memory"):
            await sender.engine.write(
                peer.session_id,
                [good, bad],
                timeout_s=TIMEOUT_S,
                on_settled=lambda settled=settled: settled.append(True),
            )
        assert settled == [True]
    assert peer.digest(0, 64) == zeros


@pytest.mark.parametrize("nbytes", [0, -1])
async def test_a_block_without_bytes_is_refused(sender: Sender, nbytes: int) -> None:
    with pytest.raises(TransferError, match="at least one byte"):
        await sender.engine.write(
            "127.0.0.1:1", [Block(sender.memory.address, 1, nbytes)], timeout_s=TIMEOUT_S
        )


async def test_a_destination_outside_the_peers_memory_is_refused(sender: Sender) -> None:
    peer = sender.new_peer()
    with pytest.raises(TransferError):
        await sender.engine.write(
            peer.session_id,
            [Block(sender.memory.address, peer.address + peer.nbytes, 64)],
            timeout_s=TIMEOUT_S,
        )
    blocks = blocks_between(sender, peer, nbytes=64)
    await sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
    assert holds(sender, peer, blocks)


async def test_a_peer_that_is_gone_is_an_error_and_the_source_settles(sender: Sender) -> None:
    peer = sender.new_peer()
    blocks = blocks_between(sender, peer, nbytes=64)
    await sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S)
    peer.kill()
    failures = sender.engine.stats.num_failures_total
    settled = asyncio.Event()
    with pytest.raises(TransferError):
        await sender.engine.write(
            peer.session_id, blocks, timeout_s=TIMEOUT_S, on_settled=settled.set
        )
    async with asyncio.timeout(TIMEOUT_S):
        await settled.wait()
    assert sender.engine.stats.num_failures_total == failures + 1


async def test_a_restarted_peer_is_written_to_under_its_new_session(sender: Sender) -> None:
    old = sender.new_peer()
    blocks = blocks_between(sender, old, nbytes=64)
    await sender.engine.write(old.session_id, blocks, timeout_s=TIMEOUT_S)
    old.kill()
    new = sender.new_peer()
    blocks = blocks_between(sender, new, nbytes=5_000)
    await sender.engine.write(new.session_id, blocks, timeout_s=TIMEOUT_S)
    assert holds(sender, new, blocks)


async def test_a_cancelled_write_still_settles_once(sender: Sender) -> None:
    peer = sender.new_peer()
    blocks = blocks_between(sender, peer, nbytes=32 << 20)
    settled: list[bool] = []
    done = asyncio.Event()

    def on_settled() -> None:
        settled.append(True)
        done.set()

    task = asyncio.create_task(
        sender.engine.write(peer.session_id, blocks, timeout_s=TIMEOUT_S, on_settled=on_settled)
    )
    await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait({task})
    async with asyncio.timeout(TIMEOUT_S):
        await done.wait()
    await sender.engine.write(
        peer.session_id, blocks_between(sender, peer, nbytes=64), timeout_s=TIMEOUT_S
    )
    assert settled == [True]
    assert sender.engine.stats.num_in_flight == 0


def test_overlapping_memory_cannot_be_registered(sender: Sender) -> None:
    with pytest.raises(TransferError, match="overlaps"):
        sender.engine.register(sender.memory.address + 4_096, 4_096)
