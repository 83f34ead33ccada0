import pytest
import torch

from epd.engines.torch.kv_pool import KVPool, KVShape

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_tokens=16)


def new_pool(num_blocks: int = 8) -> KVPool:
    return KVPool(torch.zeros(num_blocks * SHAPE.block_bytes, dtype=torch.uint8), SHAPE)


def test_a_block_holds_keys_and_values_of_all_layers():
    assert SHAPE.block_bytes == 3 * 2 * 16 * 2 * 4 * 4


def test_a_buffer_gives_as_many_blocks_as_fit_whole():
    buffer = torch.zeros(3 * SHAPE.block_bytes - 1, dtype=torch.uint8)
    pool = KVPool(buffer, SHAPE)
    assert (pool.num_blocks, pool.num_free_blocks, pool.max_tokens) == (2, 2, 32)


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(9999), torch.zeros(99, 99, dtype=torch.uint8), torch.zeros(99, dtype=torch.int8)],
)
def test_a_buffer_that_is_not_flat_bytes_is_refused(buffer: torch.Tensor):
    with pytest.raises(ValueError, match="flat"):
        KVPool(buffer, SHAPE)


def test_allocation_rounds_up_and_says_none_when_short():
    pool = new_pool(4)
    first = pool.allocate(17)
    assert first is not None and len(first) == 2
    assert pool.allocate(33) is None
    assert (pool.num_used_blocks, pool.num_free_blocks) == (2, 2)
    second = pool.allocate(32)
    assert second is not None and not set(first) & set(second)
    pool.free(first + second)
    assert (pool.num_used_blocks, pool.num_free_blocks) == (0, 4)


@pytest.mark.parametrize("wrong", [[0, 0], [5], [0, -1], [0, 99]])
def test_a_wrong_free_raises_and_frees_nothing(wrong: list[int]):
    pool = new_pool()
    assert pool.allocate(32) == [0, 1]
    with pytest.raises(ValueError, match="freed twice or never allocated"):
        pool.free(wrong)
    assert pool.num_used_blocks == 2


def test_a_second_free_raises():
    pool = new_pool()
    blocks = pool.allocate(20)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)
    assert pool.num_free_blocks == pool.num_blocks


def test_what_is_written_is_gathered_in_token_order():
    pool = new_pool()
    table = torch.tensor([5, 2, 7])
    slots = pool.locate(table, torch.arange(40))
    written = {layer: (torch.randn(40, 2, 4), torch.randn(40, 2, 4)) for layer in range(3)}
    for layer, (keys, values) in written.items():
        pool.write(layer, slots, keys, values)
    some = torch.tensor([39, 0, 16, 16])
    for layer, (keys, values) in written.items():
        got_keys, got_values = pool.gather(layer, pool.locate(table, some))
        assert torch.equal(got_keys, keys[some])
        assert torch.equal(got_values, values[some])


def test_all_bytes_of_a_token_lie_in_its_block():
    pool = new_pool()
    slots = pool.locate(torch.tensor([3]), torch.tensor([4]))
    for layer in range(3):
        pool.write(layer, slots, torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    start = pool.block_offset(3)
    assert start == 3 * SHAPE.block_bytes
    assert torch.equal(pool.buffer[start : start + SHAPE.block_bytes], pool.block(3))
    elsewhere = torch.cat([pool.buffer[:start], pool.buffer[start + SHAPE.block_bytes :]])
    assert not elsewhere.any()
    assert int((pool.block(3).view(torch.float32) == 1).sum()) == 3 * 2 * 2 * 4
