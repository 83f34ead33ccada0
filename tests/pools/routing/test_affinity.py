from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.pools.routing.affinity import affinity, preferred
from epd.pools.routing.snapshot import Candidate, Choice
from tests.pools.routing.candidates import idle, snapshot

KEYS = [f"image-{index}" for index in range(2000)]


def choose(
    candidates: list[Candidate], key: str = "k", num_tokens: int = 100, *, ratio: float = 1.25
) -> Choice:
    found = snapshot(candidates, num_tokens, key=key)
    return affinity(found, max_queue_ratio=ratio, free_queue_tokens=0)


def homes(candidates: list[Candidate]) -> dict[str, str]:
    return {key: choose(candidates, key).worker_id for key in KEYS}


def place(pool: dict[str, Candidate], key: str, num_tokens: int) -> str:
    """Choose, and queue the image there."""
    chosen = choose(list(pool.values()), key, num_tokens).worker_id
    queued = pool[chosen].tokens_in_flight + num_tokens
    pool[chosen] = pool[chosen]._replace(tokens_in_flight=queued)
    return chosen


def test_images_are_spread_evenly() -> None:
    counts = Counter(homes(idle(8)).values())
    assert len(counts) == 8
    # 250 each are expected; the standard deviation is 15.
    assert min(counts.values()) > 190
    assert max(counts.values()) < 310


@pytest.mark.parametrize("num_workers", [2, 8, 32])
def test_only_the_images_of_a_worker_that_leaves_move(num_workers: int) -> None:
    pool = idle(num_workers)
    before, after = homes(pool), homes(pool[1:])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == pool[0].worker_id}
    assert 0 < len(moved) < 1.5 * len(KEYS) / num_workers


def test_a_worker_that_comes_takes_its_share_from_all_and_moves_nothing_else() -> None:
    before, after = homes(idle(8)), homes([*idle(8), Candidate("new")])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"new"}
    assert {before[key] for key in moved} == {c.worker_id for c in idle(8)}
    assert len(moved) < 1.5 * len(KEYS) / 9


def test_an_image_keeps_its_home_under_load_within_the_bound() -> None:
    home = choose(idle(4)).worker_id
    # 4 · 100 queued and 100 more: up to 1.25 · 500 / 4 = 156.25 tokens may queue at one.
    pool = [c._replace(tokens_in_flight=56 if c.worker_id == home else 115) for c in idle(4)]
    assert sum(c.tokens_in_flight for c in pool) == 401
    assert choose(pool).worker_id == home
    pool = [c._replace(tokens_in_flight=57 if c.worker_id == home else 50) for c in idle(4)]
    assert choose(pool).worker_id != home


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_no_queue_is_longer_than_the_bound(
    sizes: list[int], num_workers: int, num_images: int
) -> None:
    """Few distinct images, so that without a bound a few workers would get all of them."""
    pool = {c.worker_id: c for c in idle(num_workers)}
    for index, size in enumerate(sizes):
        shortest = min(c.tokens_in_flight for c in pool.values())
        chosen = place(pool, f"image-{index % num_images}", size)
        total = sum(c.tokens_in_flight for c in pool.values())
        # On a nearly idle pool an image alone is over the ratio: then the shortest queue has it.
        allowed = max(1.25 * total / num_workers, shortest + size)
        assert pool[chosen].tokens_in_flight <= allowed


def test_a_hot_image_spills_to_the_next_in_its_own_order() -> None:
    pool = {c.worker_id: c for c in idle(6)}
    order: list[str] = []
    for _ in range(6):
        order.append(place(pool, "hot", 100))
    left = idle(6)
    for worker_id in order:
        assert preferred("hot", left).worker_id == worker_id
        left = [c for c in left if c.worker_id != worker_id]


def test_images_of_a_slow_worker_go_elsewhere_and_return() -> None:
    pool = idle(8)
    slow = choose(pool).worker_id
    stuck = [c._replace(tokens_in_flight=5000) if c.worker_id == slow else c for c in pool]
    moved = homes(stuck)
    assert slow not in moved.values()
    before = homes(pool)
    assert all(moved[key] == before[key] for key in KEYS if before[key] != slow)
    assert homes(pool) == before


def test_what_fits_the_free_queue_stays_at_home_whatever_the_mean() -> None:
    home = choose(idle(4), num_tokens=100).worker_id
    pool = [c._replace(tokens_in_flight=900) if c.worker_id == home else c for c in idle(4)]
    for free_tokens, stays in ((1000, True), (999, False)):
        found = snapshot(pool, 100, key="k")
        choice = affinity(found, max_queue_ratio=1.25, free_queue_tokens=free_tokens)
        assert (choice.worker_id == home) is stays


@settings(deadline=None, max_examples=40)
@given(st.text(), st.integers(1, 5000))
def test_a_cached_image_goes_to_its_holder(key: str, num_tokens: int) -> None:
    for holder in range(5):
        pool = idle(5, tokens_in_flight=700)
        pool[holder] = pool[holder]._replace(hit_tokens=num_tokens)
        choice = choose(pool, key, num_tokens)
        assert choice == Choice(pool[holder], "cached")


def test_a_cached_image_costs_its_holder_no_queue() -> None:
    """The holder is at its limit: it can take nothing more that needs computing."""
    # 4 · 400 queued and 100 more: the limit is 531.25.
    pool = [Candidate("holder", tokens_in_flight=530, hit_tokens=100)]
    pool += [c._replace(tokens_in_flight=357) for c in idle(3)]
    assert choose(pool).worker_id == "holder"
    assert choose([pool[0]._replace(hit_tokens=0), *pool[1:]]).worker_id != "holder"


def test_a_cached_image_is_encoded_again_when_its_holder_is_stuck_for_longer_than_that() -> None:
    # At 200 the limit is 1.25 · 300 / 4 = 93.75: the holder is 106.25 over it, another would have
    # 100 to encode and be 6.25 over it.
    for queue, stays in ((199, True), (201, False)):
        pool = [Candidate("holder", tokens_in_flight=queue, hit_tokens=100), *idle(3)]
        assert (choose(pool).worker_id == "holder") is stays


def test_holders_of_an_image_take_turns() -> None:
    pool = idle(4, hit_tokens=100)
    busy = [c._replace(num_in_flight=1, last_turn=9) for c in pool[:2]]
    rested = [c._replace(num_in_flight=1, last_turn=5) for c in pool[2:3]]
    assert choose([*busy, *rested]).worker_id == "w02"
    assert choose([*busy, *rested, pool[3]]).worker_id == "w03"


def test_a_link_outweighs_the_hash_and_as_much_cache_and_queue_as_it_costs() -> None:
    near, far = Candidate("near"), Candidate("far", link_tokens=50.0)
    assert {choose([near, far], key).worker_id for key in KEYS[:50]} == {"near"}
    # 100 tokens cached far away cost 50 to fetch, and 100 to encode here.
    assert choose([near, far._replace(hit_tokens=100)]).worker_id == "far"
    dear = far._replace(hit_tokens=100, link_tokens=150.0)
    assert choose([near, dear]).worker_id == "near"
    # At 50 the limit is 1.25 · 150 / 2 = 93.75: near is 56.25 over it, far 6.25 and 50 of link.
    for queue, expected in ((49, "near"), (51, "far")):
        busy = near._replace(tokens_in_flight=queue)
        assert choose([busy, far]).worker_id == expected
