from __future__ import annotations

import pytest
from hypothesis import given, settings

from epd.pools.routing.prefix import prefix
from epd.pools.routing.snapshot import Candidate, Choice
from tests.pools.routing.candidates import pools, snapshot


def choose(candidates: list[Candidate], num_tokens: int = 1000, *, weight: float = 1.0) -> Choice:
    return prefix(snapshot(candidates, num_tokens), backlog_weight=weight)


def test_the_longest_prefix_wins_on_an_idle_pool() -> None:
    pool = [Candidate("a", hit_tokens=100), Candidate("b", hit_tokens=300), Candidate("c")]
    assert choose(pool).worker_id == "b"


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_a_prefix_beats_backlog_up_to_the_stated_trade_and_no_further(weight: float) -> None:
    idle = Candidate("idle")
    for hit_tokens in (100, 1000):
        trade = int(hit_tokens / weight)
        holder = Candidate("holder", hit_tokens=hit_tokens)
        for backlog, expected in ((trade - 1, "holder"), (trade + 1, "idle")):
            pool = [idle, holder._replace(tokens_in_flight=backlog)]
            assert choose(pool, weight=weight).worker_id == expected, (hit_tokens, backlog)


def test_without_a_known_prefix_the_shortest_backlog_wins() -> None:
    pool = [Candidate("a", tokens_in_flight=10), Candidate("b", tokens_in_flight=9, last_turn=5)]
    assert choose(pool).worker_id == "b"


def test_what_must_be_computed_by_now_is_no_backlog() -> None:
    pool = [
        Candidate("begun", tokens_in_flight=1000, done_tokens=600),
        Candidate("fresh", tokens_in_flight=500),
    ]
    choice = choose(pool)
    assert choice.worker_id == "begun"
    assert choice.reason.endswith("400 tokens ahead")


def test_a_link_outweighs_as_much_prefix_as_it_costs() -> None:
    far = Candidate("far", link_tokens=100.0)
    for hit_tokens, expected in ((99, "near"), (101, "far")):
        pool = [Candidate("near", last_turn=3), far._replace(hit_tokens=hit_tokens)]
        assert choose(pool).worker_id == expected


@settings(deadline=None, max_examples=60)
@given(pools)
def test_nobody_would_be_done_earlier(found: list[Candidate]) -> None:
    choice = choose(found)
    left = {
        c.worker_id: 1000 - c.hit_tokens + c.tokens_in_flight - c.done_tokens + c.link_tokens
        for c in found
    }
    assert left[choice.worker_id] == min(left.values())
