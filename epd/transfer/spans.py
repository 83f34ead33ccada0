"""Which bytes of a range are free: spans by offset, joined with their neighbours. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

Span = tuple[int, int]
"""(offset, nbytes)"""


class FreeSpans:
    """The free bytes of one range."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._spans)

    @property
    def largest_nbytes(self) -> int:
        return max((nbytes for _, nbytes in self._spans), default=0)

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` in the smallest span that holds them, or None."""
        fitting = (span for span in self._spans if span[1] >= nbytes)
        best = min(fitting, key=lambda span: span[1], default=None)
        if best is None:
            return None
        index = bisect_left(self._spans, best)
        offset, available = best
        if available == nbytes:
            del self._spans[index]
        else:
            self._spans[index] = (offset + nbytes, available - nbytes)
        return offset

    def add(self, offset: int, nbytes: int) -> Span:
        """Free these bytes; the span that they are part of now."""
        index = bisect_left(self._spans, (offset, 0))
        if index < len(self._spans) and self._spans[index][0] == offset + nbytes:
            nbytes += self._spans.pop(index)[1]
        if index > 0 and sum(self._spans[index - 1]) == offset:
            before = self._spans.pop(index - 1)
            offset, nbytes = before[0], before[1] + nbytes
        insort(self._spans, (offset, nbytes))
        return offset, nbytes

    def in_the_way(self, nbytes: int, taken: Iterable[Span]) -> list[Span]:
        """Which of the `taken` spans to free so that one of `nbytes` is free; changes nothing.

        They come cheapest first, and none is looked at that is dearer than it must be. Each one
        returned is needed. Empty if all of them together would not be enough.
        """
        future = FreeSpans(self._spans)
        freed: list[Span] = []
        for span in taken:
            freed.append(span)
            start, length = future.add(*span)
            if length >= nbytes:
                return _spare(freed, start, start + length, nbytes)
        return []


def _spare(freed: list[Span], start: int, end: int, nbytes: int) -> list[Span]:
    """Those of `freed` that a gap of `nbytes` between `start` and `end` needs, dear ones spared.

    The last of them closed the gap, so it is needed.
    """
    for offset, size in reversed(freed[:-1]):
        if not start <= offset < end:
            continue
        if end - (offset + size) >= nbytes:
            start = offset + size
        elif offset - start >= nbytes:
            end = offset
    return [span for span in freed if start <= span[0] < end]
