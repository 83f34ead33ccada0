import asyncio

import pytest

from epd.clock import FakeClock
from epd.engines.torch.embedding_store import EmbeddingStore
from epd.engines.torch.image_source import ImageReference
from epd.engines.torch.parts import PartState, PartTable
from epd.errors import BadRequestError, DeadlineError, MediaError, WorkerError
from epd.wire import EncodeResponse, part_id

PART = part_id("r", 0)
IMAGES = [ImageReference("http://coordinator/internal/media/x")]
RESPONSE = EncodeResponse(
    req_id=PART, part_idx=0, embedding_size=4, embedding_len=1, embedding_dim=1
)


@pytest.fixture
def store() -> EmbeddingStore:
    return EmbeddingStore(1 << 20, 256, FakeClock())


async def is_idle(store: EmbeddingStore) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await store.wait_idle()
    except TimeoutError:
        return False
    return True


async def test_a_part_is_encoded_sent_and_let_go(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    part = table.open(PART, IMAGES)
    table.hold(part, "k")
    table.publish(part, RESPONSE)
    assert await table.wait_encoded(PART, 1) == RESPONSE
    sending = table.begin_send(PART)
    assert not await is_idle(store)
    table.remove(sending)
    assert await is_idle(store)
    with pytest.raises(WorkerError, match="not here"):
        table.begin_send(PART)


async def test_sizes_may_be_asked_for_before_the_part_comes(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    waiting = asyncio.create_task(table.wait_encoded(PART, 5))
    await asyncio.sleep(0)
    part = table.open(PART, IMAGES)
    table.publish(part, RESPONSE)
    assert await waiting == RESPONSE
    table.close()


async def test_who_asks_for_a_part_that_never_comes_is_told_and_forgotten(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    with pytest.raises(DeadlineError):
        await table.wait_encoded(PART, 0.01)
    assert not table._parts


async def test_a_failure_reaches_who_waits(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    waiting = asyncio.create_task(table.wait_encoded(PART, 5))
    await asyncio.sleep(0)
    table.remove(table.open(PART, IMAGES), MediaError("no image"))
    with pytest.raises(MediaError):
        await waiting


async def test_a_part_that_nobody_sends_for_goes_when_its_lease_ends(store: EmbeddingStore):
    table = PartTable(store, lease_s=0.01)
    part = table.open(PART, IMAGES)
    table.hold(part, "k")
    table.publish(part, RESPONSE)
    await asyncio.sleep(0.03)
    assert part.state is PartState.GONE
    assert await is_idle(store)


async def test_a_failed_write_leaves_the_part_for_another_try_under_a_new_lease(
    store: EmbeddingStore,
):
    table = PartTable(store, lease_s=0.02)
    part = table.open(PART, IMAGES)
    table.hold(part, "k")
    table.publish(part, RESPONSE)
    table.begin_send(PART)
    await asyncio.sleep(0.04)
    assert part.state is PartState.SENDING, "the lease rests while it is sent"
    table.send_again(part)
    assert table.begin_send(PART) is part
    table.send_again(part)
    await asyncio.sleep(0.04)
    assert await is_idle(store)


async def test_aborting_a_request_removes_its_parts_and_no_others(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    for req_id in (part_id("r", 0), part_id("r", 1), part_id("other", 0)):
        part = table.open(req_id, IMAGES)
        table.hold(part, "k")
        table.publish(part, RESPONSE)
    table.remove_request("r")
    assert not await is_idle(store)
    table.remove(table.begin_send(part_id("other", 0)))
    assert await is_idle(store)


async def test_an_image_that_is_encoded_too_late_for_its_part_is_not_held(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    part = table.open(PART, IMAGES)
    table.remove_request("r")
    table.hold(part, "k")
    assert await is_idle(store)


async def test_a_part_is_not_encoded_twice(store: EmbeddingStore):
    table = PartTable(store, lease_s=5)
    table.open(PART, IMAGES)
    with pytest.raises(BadRequestError, match="already"):
        table.open(PART, IMAGES)
    table.close()
