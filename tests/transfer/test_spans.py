from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from epd.transfer.spans import FreeSpans, Span


def cut(sizes: list[int]) -> list[Span]:
    """Neighbouring spans of these sizes."""
    starts = itertools.accumulate(sizes, initial=0)
    return list(zip(starts, sizes, strict=False))


def largest_after(free: list[Span], freed: list[Span]) -> int:
    spans = FreeSpans(free)
    for span in freed:
        spans.add(*span)
    return spans.largest_nbytes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[Span], list[Span], int]:
    """(free, expendable cheapest first, wanted) of a range of which some is neither."""
    spans = cut(draw(st.lists(st.integers(1, 9), min_size=1, max_size=12)))
    kinds = draw(st.lists(st.sampled_from("fet"), min_size=len(spans), max_size=len(spans)))
    free = [span for span, kind in zip(spans, kinds, strict=True) if kind == "f"]
    expendable = [span for span, kind in zip(spans, kinds, strict=True) if kind == "e"]
    return free, draw(st.permutations(expendable)), draw(st.integers(1, 40))


@given(ranges())
def test_each_span_in_the_way_must_go_and_no_cheaper_ones_would_do(
    case: tuple[list[Span], list[Span], int],
) -> None:
    free, expendable, wanted = case
    spans = FreeSpans(free)
    if spans.largest_nbytes >= wanted:
        return
    chosen = spans.in_the_way(wanted, expendable)
    assert spans.nbytes == sum(nbytes for _, nbytes in free), "nothing has changed"
    if not chosen:
        assert largest_after(free, expendable) < wanted
        return
    assert largest_after(free, chosen) >= wanted
    for span in chosen:
        assert largest_after(free, [other for other in chosen if other != span]) < wanted
    dearest = max(expendable.index(span) for span in chosen)
    assert largest_after(free, expendable[:dearest]) < wanted


def test_the_dearer_neighbour_is_spared() -> None:
    left, middle, right = cut([4, 4, 4])
    assert FreeSpans().in_the_way(8, [left, right, middle]) == [left, middle]
    assert FreeSpans().in_the_way(8, [right, left, middle]) == [right, middle]
