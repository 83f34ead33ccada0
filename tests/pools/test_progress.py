from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.pools.progress import Piece, Progress


def done(progress: Progress, piece: Piece, now_s: float) -> None:
    piece.is_done = True
    progress.end(piece, now_s)


def test_nothing_is_thought_done_by_a_worker_whose_speed_is_unknown() -> None:
    progress = Progress()
    assert progress.done_tokens(5.0) == 0
    progress.begin(1000, 0.0)
    assert progress.tokens_per_s == 0
    assert progress.done_tokens(1000.0) == 0


def test_the_oldest_piece_is_done_as_fast_as_those_before_it_and_no_more_than_all() -> None:
    progress = Progress()
    done(progress, progress.begin(500, 0.0), 2.0)
    assert progress.tokens_per_s == 250
    progress.begin(1000, 10.0)
    progress.begin(1000, 10.5)
    assert progress.done_tokens(10.0) == 0
    assert progress.done_tokens(11.0) == 250
    assert progress.done_tokens(99.0) == 1000, "the second begins when the first has ended"


def test_a_piece_that_waited_begins_when_the_one_before_it_ends() -> None:
    progress = Progress()
    first, second = progress.begin(100, 0.0), progress.begin(300, 0.0)
    done(progress, first, 1.0)
    assert progress.done_tokens(2.0) == 100
    done(progress, second, 4.0)  # 300 tokens in 3 s: as fast as the first
    assert progress.tokens_per_s == pytest.approx(100)


def test_what_is_given_up_tells_nothing_of_the_speed() -> None:
    progress = Progress()
    done(progress, progress.begin(100, 0.0), 1.0)
    progress.end(progress.begin(10_000, 1.0), 1.001)
    assert progress.tokens_per_s == 100
    assert progress.done_tokens(9.0) == 0


def test_a_worker_that_gets_slower_is_soon_known_to_be() -> None:
    progress = Progress()
    now_s = 0.0
    for seconds, number in ((1.0, 50), (4.0, 30)):
        for _ in range(number):
            piece = progress.begin(1000, now_s)
            now_s += seconds
            done(progress, piece, now_s)
    assert progress.tokens_per_s == pytest.approx(250, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "done", "given up"]), st.integers(0, 5), st.floats(0, 9)
        ),
        max_size=40,
    )
)
def test_done_tokens_are_never_more_than_the_oldest_has(
    steps: list[tuple[str, int, float]],
) -> None:
    progress, line, now_s = Progress(), list[Piece](), 0.0
    for what, number, seconds in steps:
        now_s += seconds
        if what == "begin":
            line.append(progress.begin(100 * number, now_s))
        elif number < len(line):
            piece = line.pop(number)
            piece.is_done = what == "done"
            progress.end(piece, now_s)
        assert 0 <= progress.done_tokens(now_s) <= (line[0].tokens if line else 0)
        assert progress.done_tokens(now_s + 1e9) <= (line[0].tokens if line else 0)
