import asyncio

import pytest

from encoders import ImageGrid
from epd.clock import FakeClock
from epd.engines.torch.embedding_store import EmbeddingStore, Entry, Stored
from epd.errors import MediaError, OverloadedError

SIZE = 256


@pytest.fixture
def store() -> EmbeddingStore:
    return EmbeddingStore(1 << 20, 3 * SIZE, FakeClock())


class Maker:
    """Encodes by taking a region; counts, and waits if told to."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        self.num_calls = 0
        self.go = asyncio.Event()
        self.go.set()

    def pin(self, key: str, nbytes: int = SIZE) -> tuple[Entry, bool]:
        return self.store.pin(key, lambda: self._make(key, nbytes))

    async def stored(self, key: str, nbytes: int = SIZE) -> Entry:
        entry, _ = self.pin(key, nbytes)
        await entry.stored()
        return entry

    async def cached(self, key: str, nbytes: int = SIZE) -> None:
        self.store.unpin(await self.stored(key, nbytes))

    async def _make(self, key: str, nbytes: int) -> Stored:
        self.num_calls += 1
        await self.go.wait()
        region = await self.store.reserve(nbytes, key, 0.05)
        return Stored(region, ImageGrid(1, 2, 2), 1)


async def test_an_image_wanted_twice_at_once_is_encoded_once(store: EmbeddingStore):
    maker = Maker(store)
    maker.go.clear()
    first, is_hit = maker.pin("a")
    second, is_second_hit = maker.pin("a")
    assert (first is second, is_hit, is_second_hit) == (True, False, True)
    maker.go.set()
    assert await first.stored() == await second.stored()
    assert maker.num_calls == 1
    assert store.needed_bytes == SIZE
    store.unpin(first)
    assert store.needed_bytes == SIZE
    store.unpin(second)
    assert store.needed_bytes == 0
    assert store.arena.stats().used_bytes == SIZE


async def test_one_who_leaves_does_not_stop_the_other_and_the_last_one_does(store: EmbeddingStore):
    maker = Maker(store)
    maker.go.clear()
    entry, _ = maker.pin("a")
    maker.pin("a")
    await asyncio.sleep(0)
    store.unpin(entry)
    await asyncio.sleep(0)
    assert not entry.task.done()
    store.unpin(entry)
    await asyncio.gather(entry.task, return_exceptions=True)
    assert entry.task.cancelled()
    newcomer, is_hit = maker.pin("a")
    assert not is_hit
    maker.go.set()
    await newcomer.stored()
    store.unpin(newcomer)
    await asyncio.wait_for(store.wait_idle(), 1)


async def test_the_least_recently_used_unpinned_image_makes_room(store: EmbeddingStore):
    maker = Maker(store)
    for key in "aba":
        await maker.cached(key)
    await maker.stored("c")
    await maker.stored("d")
    assert maker.pin("a")[1]
    assert not maker.pin("b")[1]
    await store.close()


async def test_no_more_images_go_than_are_in_the_way(store: EmbeddingStore):
    maker = Maker(store)
    for key in "abc":
        await maker.cached(key)
    await maker.stored("d")
    assert [maker.pin(key)[1] for key in "bc"] == [True, True]
    assert store.arena.stats().used_bytes == 3 * SIZE


async def test_cached_images_stay_while_their_room_would_not_be_enough(store: EmbeddingStore):
    maker = Maker(store)
    held = await maker.stored("a")
    await maker.cached("b")
    waiting = asyncio.create_task(maker.stored("large", 3 * SIZE))
    await asyncio.sleep(0.01)
    assert store.arena.stats().used_bytes == 2 * SIZE, "b makes way when that is enough"
    store.unpin(held)
    await waiting
    assert store.arena.stats().num_regions == 1


async def test_who_waits_for_room_costs_nobody_else_a_cached_image(store: EmbeddingStore):
    maker = Maker(store)
    held = await maker.stored("a")
    await maker.cached("b")
    first = asyncio.create_task(maker.stored("large", 3 * SIZE))
    await asyncio.sleep(0)
    second = asyncio.create_task(maker.stored("small"))
    await asyncio.sleep(0.01)
    assert store.arena.stats().num_waiters == 2
    assert store.arena.stats().used_bytes == 2 * SIZE
    store.unpin(held)
    store.unpin(await first)
    await second
    assert store.arena.stats().num_regions == 1


async def test_a_held_image_stays_as_long_as_another_can_go(store: EmbeddingStore):
    maker = Maker(store)
    for key in "abc":
        await maker.cached(key)
    store.hold("a")
    await maker.cached("d")
    await maker.cached("e")
    assert maker.pin("a")[1]
    assert store.needed_bytes == SIZE
    await store.close()


async def test_of_held_images_the_latest_goes(store: EmbeddingStore):
    maker = Maker(store)
    for key in "abc":
        await maker.cached(key)
        store.hold(key)
    await maker.stored("d")
    assert [maker.pin(key)[1] for key in "abc"] == [True, True, False]
    await store.close()


async def test_two_who_hold_half_of_the_room_each_do_not_wait_for_each_other():
    store = EmbeddingStore(1 << 20, 2 * SIZE, FakeClock())
    maker = Maker(store)

    async def request(*keys: str) -> None:
        for key in keys:
            await maker.cached(key)
            store.hold(key)
            await asyncio.sleep(0)  # the other has its turn
        for key in keys:
            await maker.cached(key)
            store.let_go(key)

    await asyncio.gather(request("a1", "a2"), request("b1", "b2"))
    assert store.needed_bytes == 0
    await asyncio.wait_for(store.wait_idle(), 1)


async def test_the_store_is_idle_when_nobody_pins_or_holds(store: EmbeddingStore):
    entry = await Maker(store).stored("a")
    store.hold("a")
    store.hold("a")
    store.unpin(entry)
    store.let_go("a")
    waiting = asyncio.create_task(store.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    store.let_go("a")
    await asyncio.wait_for(waiting, 1)


async def test_pinned_images_stay_and_a_newcomer_waits_for_one_to_go(store: EmbeddingStore):
    maker = Maker(store)
    entries = [await maker.stored(key) for key in "abc"]
    waiting = asyncio.create_task(maker.stored("d"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    store.unpin(entries[1])
    await waiting
    assert store.arena.stats().used_bytes == 3 * SIZE


async def test_no_room_in_time_is_told_and_leaves_no_entry(store: EmbeddingStore):
    maker = Maker(store)
    for key in "abc":
        await maker.stored(key)
    entry, _ = maker.pin("d")
    with pytest.raises(OverloadedError):
        await entry.stored()
    store.unpin(entry)
    assert not maker.pin("d")[1], "a failure is not cached"
    await store.close()


async def test_an_image_larger_than_the_arena_is_refused(store: EmbeddingStore):
    with pytest.raises(MediaError, match=r"more than the 768 .* \(embedding_bytes\): send a"):
        await store.reserve(4 * SIZE, "test", 1)
