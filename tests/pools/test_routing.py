from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.pools.routing import Candidate, least_loaded

IDLE = Candidate("a", tokens_in_flight=0, num_in_flight=0, num_placed=0)


def test_fewest_tokens_win_over_fewest_requests() -> None:
    many_small = replace(IDLE, worker_id="b", tokens_in_flight=10, num_in_flight=5)
    one_large = replace(IDLE, worker_id="a", tokens_in_flight=1000, num_in_flight=1)
    assert least_loaded([one_large, many_small]) is many_small


def test_equal_tokens_are_told_apart_by_requests() -> None:
    busy = replace(IDLE, worker_id="a", num_in_flight=2)
    free = replace(IDLE, worker_id="b", num_in_flight=1)
    assert least_loaded([busy, free]) is free


def test_ties_go_to_the_one_that_was_given_least() -> None:
    placed = Counter({"a": 0, "b": 0, "c": 0})
    for _ in range(9):
        choice = least_loaded([replace(IDLE, worker_id=w, num_placed=placed[w]) for w in placed])
        placed[choice.worker_id] += 1
    assert set(placed.values()) == {3}


counts = st.integers(0, 3)
candidates = st.lists(
    st.builds(Candidate, st.text(min_size=1, max_size=2), counts, counts, counts),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.worker_id,
)


@settings(deadline=None, max_examples=50)
@given(candidates, st.permutations(range(8)))
def test_the_choice_does_not_depend_on_the_order(found: list[Candidate], order: list[int]) -> None:
    choice = least_loaded(found)
    shuffled = [found[index] for index in order if index < len(found)]
    assert least_loaded(shuffled) == choice
    assert choice.tokens_in_flight == min(c.tokens_in_flight for c in found)
