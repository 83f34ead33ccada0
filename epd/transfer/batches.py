"""Shapes a write for the wire: few large blocks in batches of bounded count and size.

Pure arithmetic over blocks, called by `mooncake.py` before it submits anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from epd.transfer.base import Block

MAX_BLOCK_BYTES = 16 << 20
"""For a 64 MB write 4 to 64 MB do equally well (1.2-1.7 GB/s), 1 MB less (1.1) and 256 KB half
(0.75). The cut lets a write stop soon after its deadline. (Mooncake 0.3.13, loopback TCP, two
cores, December 2026.)"""

MAX_BATCH_BLOCKS = 1_024
"""Above about 2,050 outstanding blocks a peer refuses at once and stays unusable for a while."""

MAX_BATCH_BYTES = 64 << 20
"""Writes to one peer take turns by batch, so this bounds how long a small one waits."""


def plan_batches(blocks: Sequence[Block]) -> list[list[Block]]:
    """The same bytes as `blocks`, joined where adjacent, cut, and grouped in order."""
    batches: list[list[Block]] = []
    batch_bytes = 0
    for block in _cut(_join(blocks)):
        is_full = batches and (
            len(batches[-1]) == MAX_BATCH_BLOCKS or batch_bytes + block.nbytes > MAX_BATCH_BYTES
        )
        if not batches or is_full:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(block)
        batch_bytes += block.nbytes
    return batches


def _join(blocks: Iterable[Block]) -> Iterator[Block]:
    """Merge each block into the one before it where both sides are contiguous."""
    run: Block | None = None
    for block in blocks:
        if (
            run is not None
            and run.source + run.nbytes == block.source
            and run.destination + run.nbytes == block.destination
        ):
            run = Block(run.source, run.destination, run.nbytes + block.nbytes)
            continue
        if run is not None:
            yield run
        run = block
    if run is not None:
        yield run


def _cut(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        for start in range(0, block.nbytes, MAX_BLOCK_BYTES):
            nbytes = min(MAX_BLOCK_BYTES, block.nbytes - start)
            yield Block(block.source + start, block.destination + start, nbytes)
