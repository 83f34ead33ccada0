"""A worker's circuit breaker: one that keeps failing is left alone, then tried with one request.

    closed ─ failures in a row ─→ open ─ time ─→ half-open ─ success ─→ closed
                                    ↑─────── failure ───────┘ for twice as long

Leases and broken connections tell of workers that are gone; this is for those that answer, wrongly.
"""

from __future__ import annotations

from epd.config import BreakerConfig


class Breaker:
    """The breaker of one life of one worker. Seconds are of the registry's monotonic clock."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._num_failures = 0
        self._num_openings = 0
        self._closed_from_s: float | None = None
        """When it may be tried again; None while closed."""

    @property
    def is_closed(self) -> bool:
        return self._closed_from_s is None

    def admits(self, now_s: float, *, is_idle: bool) -> bool:
        """Whether the worker may be given work.

        Args:
            now_s: the time.
            is_idle: whether it has none; half-open, it gets one piece of work at a time.
        """
        return self._closed_from_s is None or (now_s >= self._closed_from_s and is_idle)

    def failed(self, now_s: float, *, is_hung: bool = False) -> bool:
        """The worker failed at a request. Returns whether that opened the breaker.

        Args:
            now_s: the time.
            is_hung: the worker did not even answer; one such failure is enough.
        """
        self._num_failures += 1
        was_closed = self._closed_from_s is None
        if was_closed and not is_hung and self._num_failures < self._config.max_failures:
            return False
        if self._closed_from_s is not None and now_s < self._closed_from_s:
            return False  # of what it was given before
        open_s = min(self._config.open_s * 2**self._num_openings, self._config.max_open_s)
        self._closed_from_s = now_s + open_s
        self._num_openings += 1
        return True

    def succeeded(self, now_s: float) -> None:
        """The worker did what it was asked to."""
        if self._closed_from_s is not None and now_s < self._closed_from_s:
            return  # it was given that before it failed
        self._num_failures = 0
        self._num_openings = 0
        self._closed_from_s = None
