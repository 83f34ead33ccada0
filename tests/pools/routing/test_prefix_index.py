from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.pools.routing.prefix_index import Block, PrefixIndex
from epd.types import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def chain(text: str, num_tokens: int = 10) -> list[Block]:
    """A block for each letter."""
    return [Block(hash(text[: end + 1]), num_tokens) for end in range(len(text))]


def index_of(max_blocks: int = 100, **prompts: Sequence[str]) -> PrefixIndex:
    index = PrefixIndex(max_blocks=max_blocks)
    for worker_id, texts in prompts.items():
        for text in texts:
            index.add(WorkerId(worker_id), chain(text), max_tokens=0)
    return index


def test_each_worker_has_the_prefix_that_was_sent_there() -> None:
    index = index_of(a=["system-one"], b=["system-two", "other"])
    assert index.find(chain("system-one")) == {A: 100, B: 70}
    assert index.find(chain("system-three")) == {A: 70, B: 80}
    assert index.find(chain("system")) == {A: 60, B: 60}
    assert index.find(chain("other")) == {B: 50}
    assert index.find(chain("ystem-one")) == index.find([]) == {}


def test_blocks_are_counted_in_their_own_tokens() -> None:
    index = PrefixIndex(max_blocks=10)
    prompt = [Block(1, 5), Block(2, 1000), Block(3, 7)]
    index.add(A, prompt[:2], max_tokens=0)
    assert index.find(prompt) == {A: 1005}


def test_a_worker_forgets_leaves_first_and_what_was_used_longest_ago() -> None:
    index = index_of(max_blocks=6, a=["abcd", "xy"])
    index.add(A, chain("ab"), max_tokens=0)  # used again
    index.add(A, chain("pq"), max_tokens=0)  # two too many
    assert index.find(chain("abcd")) == {A: 20}
    assert index.find(chain("xy")) == {A: 20}
    assert index.find(chain("pq")) == {A: 20}


def test_a_worker_remembers_no_more_tokens_than_its_cache_holds() -> None:
    index = PrefixIndex(max_blocks=100)
    index.add(A, chain("abcdef"), max_tokens=45)
    assert index.find(chain("abcdef")) == {A: 40}


def test_one_worker_evicts_nothing_of_another() -> None:
    index = index_of(max_blocks=3, a=["abc"], b=["abc", "xyz"])
    assert index.find(chain("abc")) == {A: 30}
    assert index.find(chain("xyz")) == {B: 30}


def test_told_evictions_shorten_what_is_known() -> None:
    index = index_of(a=["abcd"], b=["abcd"])
    index.shrink(A, 15)
    assert index.find(chain("abcd")) == {A: 20, B: 40}
    index.shrink(A, 1000)
    index.shrink(WorkerId("unknown"), 5)
    assert index.find(chain("abcd")) == {B: 40}


def test_a_forgotten_worker_leaves_nothing_behind_and_its_place_is_used_again() -> None:
    index = index_of(a=["abc"], b=["abcd"])
    index.forget(A)
    index.forget(WorkerId("unknown"))
    index.add(WorkerId("c"), chain("xy"), max_tokens=0)
    assert index.find(chain("abcd")) == {B: 40}
    assert index.find(chain("xy")) == {"c": 20}
    index.forget(B)
    index.forget(WorkerId("c"))
    assert len(index) == 0
    assert index._holders == index._by_bit == {}


steps = st.lists(st.tuples(st.sampled_from("abc"), st.text("xy", min_size=1, max_size=6)))


@settings(deadline=None, max_examples=100)
@given(steps, st.text("xy", max_size=8))
def test_the_index_finds_what_a_search_through_all_prompts_finds(
    sent: list[tuple[str, str]], prompt: str
) -> None:
    index = PrefixIndex(max_blocks=1000)
    expected: dict[str, int] = {}
    for worker_id, text in sent:
        index.add(WorkerId(worker_id), chain(text), max_tokens=0)
        common = next(
            (n for n in range(min(len(text), len(prompt))) if text[n] != prompt[n]),
            min(len(text), len(prompt)),
        )
        if common:
            expected[worker_id] = max(expected.get(worker_id, 0), 10 * common)
    assert index.find(chain(prompt)) == expected


@settings(deadline=None, max_examples=60)
@given(steps)
def test_the_index_stays_within_its_bounds(sent: list[tuple[str, str]]) -> None:
    index = PrefixIndex(max_blocks=4)
    for worker_id, text in sent:
        index.add(WorkerId(worker_id), chain(text), max_tokens=30)
        for cache in index._caches.values():
            assert cache.num_tokens == sum(cache.blocks.values()) <= 30
            assert len(cache.blocks) <= 4
        assert len(index) == sum(bits.bit_count() for bits in index._holders.values())
