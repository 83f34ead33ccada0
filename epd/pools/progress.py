"""How far a worker must have come with what it was given, judged by how fast it was before."""

from __future__ import annotations

from dataclasses import dataclass

_FADE = 0.9
"""What the past counts for, after each piece of work."""


@dataclass(slots=True, eq=False)
class Piece:
    """One piece of work at a worker."""

    tokens: int
    since_s: float
    is_done: bool = False
    """Set by whoever sees it done; one that ends without tells nothing of the worker's speed."""


class Progress:
    """The pieces of work of one worker that does one after the other, the oldest first.

    That is what a prefill worker does with prompts. Where it takes several at once, or has to wait
    for a prompt's images, more may be thought done of the oldest than is, but never more than all.
    Times are of any one monotonic clock.
    """

    def __init__(self) -> None:
        self._line: dict[Piece, None] = {}
        self._last_end_s = float("-inf")
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The worker's speed in its last pieces, the larger ones counting more; 0 if unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def begin(self, tokens: int, now_s: float) -> Piece:
        """The worker is given a piece of work."""
        piece = Piece(tokens, now_s)
        self._line[piece] = None
        return piece

    def end(self, piece: Piece, now_s: float) -> None:
        """The worker is rid of it, done or not."""
        del self._line[piece]
        began_s = max(piece.since_s, self._last_end_s)
        if piece.is_done and now_s > began_s:
            self._tokens = _FADE * self._tokens + piece.tokens
            self._seconds = _FADE * self._seconds + now_s - began_s
        self._last_end_s = now_s

    def done_tokens(self, now_s: float) -> int:
        """Tokens of its pieces that must be done by now: of the oldest, as the speed has it."""
        oldest = next(iter(self._line), None)
        if oldest is None:
            return 0
        began_s = max(oldest.since_s, self._last_end_s)
        return min(oldest.tokens, int((now_s - began_s) * self.tokens_per_s))
