from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.transfer import Block
from epd.transfer.batches import (
    MAX_BATCH_BLOCKS,
    MAX_BATCH_BYTES,
    MAX_BLOCK_BYTES,
    plan_batches,
)


def test_blocks_adjacent_on_both_sides_are_joined() -> None:
    blocks = [Block(1_000 + at, 9_000 + at, 10) for at in range(0, 100, 10)]
    assert plan_batches(blocks) == [[Block(1_000, 9_000, 100)]]


def test_blocks_adjacent_on_one_side_only_stay_apart() -> None:
    blocks = [Block(0, 0, 10), Block(10, 20, 10), Block(30, 30, 10)]
    assert plan_batches(blocks) == [blocks]


def test_nothing_makes_no_batch() -> None:
    assert plan_batches([]) == []


@given(
    st.lists(st.tuples(st.integers(1, 3 * MAX_BLOCK_BYTES), st.booleans()), max_size=30),
    st.integers(1, 200),
)
def test_every_byte_is_moved_once_in_order_within_the_limits(
    sizes: list[tuple[int, bool]], repeat: int
) -> None:
    blocks, at = [], 0
    for nbytes, is_adjacent in sizes:
        at += 0 if is_adjacent else 1
        blocks.append(Block(at, 2 * at, nbytes) if at % 2 else Block(at, at, nbytes))
        at += nbytes
    blocks += [Block(10 * n, 20 * n, 1) for n in range(repeat * 10)]
    batches = plan_batches(blocks)
    for batch in batches:
        assert 0 < len(batch) <= MAX_BATCH_BLOCKS
        assert sum(block.nbytes for block in batch) <= MAX_BATCH_BYTES
        assert all(0 < block.nbytes <= MAX_BLOCK_BYTES for block in batch)
    moved = [block for batch in batches for block in batch]
    assert joined(moved) == joined(blocks)


def joined(blocks: list[Block]) -> list[Block]:
    """The longest runs: equal for two lists that move the same bytes in the same order."""
    runs: list[Block] = []
    for block in blocks:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.source + last.nbytes == block.source
            and last.destination + last.nbytes == block.destination
        ):
            runs[-1] = Block(last.source, last.destination, last.nbytes + block.nbytes)
        else:
            runs.append(block)
    return runs
