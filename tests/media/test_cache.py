import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import OverloadedError
from epd.media import MediaCache, MediaItem, MediaLease


def item(name: str, num_bytes: int = 10) -> MediaItem:
    return MediaItem(name, b"x" * num_bytes, "image/png", 1, 1)


def test_the_least_recently_used_image_leaves_first() -> None:
    cache = MediaCache(30)
    for name in "abc":
        cache.put(item(name))
    assert cache.get("a") is not None
    cache.put(item("d"))
    assert cache.get("b") is None
    assert [cache.get(name) is not None for name in "acd"] == [True] * 3
    assert (cache.used_bytes, cache.num_items) == (30, 3)


def test_an_image_put_twice_is_kept_once() -> None:
    cache = MediaCache(30)
    cache.put(item("a"))
    cache.put(item("a"))
    assert (cache.used_bytes, cache.num_items) == (10, 1)


def test_a_pinned_image_is_not_evicted() -> None:
    cache = MediaCache(30)
    cache.pin(item("a"))
    for name in "bcdef":
        cache.put(item(name))
    assert cache.get("a") is not None
    assert (cache.pinned_bytes, cache.used_bytes) == (10, 30)
    cache.unpin("a")
    for name in "ghi":
        cache.put(item(name))
    assert cache.get("a") is None
    assert cache.pinned_bytes == 0


def test_a_full_cache_of_pins_is_overloaded_and_keeps_what_it_has() -> None:
    cache = MediaCache(30)
    cache.pin(item("a", 15))
    cache.put(item("b", 10))
    with pytest.raises(OverloadedError) as caught:
        cache.pin(item("c", 16))
    assert caught.value.retryable and caught.value.retry_after_s
    assert (cache.num_items, cache.used_bytes, cache.pinned_bytes) == (2, 25, 15)
    cache.unpin("a")
    cache.pin(item("c", 16))
    assert cache.get("c") is not None


def test_pins_are_counted() -> None:
    cache = MediaCache(10)
    cache.pin(item("a"))
    cache.pin(item("a"))
    cache.unpin("a")
    with pytest.raises(OverloadedError):
        cache.put(item("b"))
    cache.unpin("a")
    cache.put(item("b"))
    assert cache.get("a") is None


def test_a_lease_pins_once_each_and_releases_once() -> None:
    cache = MediaCache(100)
    with MediaLease(cache, 3) as lease:
        lease.hold(2, item("b"))
        lease.hold(0, item("a"))
        lease.hold(1, item("a"))
        assert [held.content_hash for held in lease.items] == ["a", "a", "b"]
        assert lease.num_bytes == cache.pinned_bytes == 20
        lease.release()
        assert cache.pinned_bytes == 0
    assert cache.pinned_bytes == 0
    assert cache.num_items == 2


operations = st.lists(
    st.tuples(st.sampled_from(["put", "pin", "unpin", "get"]), st.integers(0, 7)), max_size=60
)


@given(operations)
def test_the_budget_and_the_pins_hold_after_any_sequence(steps: list[tuple[str, int]]) -> None:
    cache, pins = MediaCache(40), [0] * 8
    for step, n in steps:
        image = item(str(n), 1 + 5 * n)
        try:
            if step == "put":
                cache.put(image)
            elif step == "pin":
                cache.pin(image)
                pins[n] += 1
            elif step == "unpin" and pins[n]:
                cache.unpin(str(n))
                pins[n] -= 1
            elif step == "get":
                cache.get(str(n))
        except OverloadedError:
            assert cache.pinned_bytes + image.num_bytes > 40
        assert cache.used_bytes <= 40
        held = [n for n in range(8) if pins[n]]
        assert cache.pinned_bytes == sum(1 + 5 * n for n in held)
        assert all(cache.get(str(n)) is not None for n in held)
