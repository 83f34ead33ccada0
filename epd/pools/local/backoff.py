"""How long to wait before a crashed process is started again."""

from __future__ import annotations


class Backoff:
    """Doubles the wait with each crash in a row, and forgets them once a run went well."""

    def __init__(
        self, *, first_s: float = 0.5, longest_s: float = 30.0, ran_well_s: float = 30.0
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._ran_well_s = ran_well_s
        self._num_crashes = 0

    def delay_s(self, ran_s: float) -> float:
        """The wait after a run of `ran_s` seconds that ended in a crash."""
        if ran_s >= self._ran_well_s:
            self._num_crashes = 0
        # Sixteen doublings are beyond any sensible limit; unbounded, the power would overflow.
        delay_s = self._first_s * 2.0 ** min(self._num_crashes, 16)
        self._num_crashes += 1
        return min(delay_s, self._longest_s)
