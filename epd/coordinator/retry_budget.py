"""How many retries may run at once, so that a sick fleet is not made sicker by them.

A share of the requests in flight and a few more, as Envoy's retry budget has it ("Circuit breaking:
retry budget", envoyproxy.io). What a dead worker leaves behind is moved free of it: each worker
dies once, and its work was not going to be done there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from epd.config import RetryConfig


class RetryBudget:
    """The retries of one coordinator.

    Args:
        config: the limits.
        num_in_flight: how many requests are in flight now.
    """

    def __init__(self, config: RetryConfig, num_in_flight: Callable[[], int]) -> None:
        self._config = config
        self._num_in_flight = num_in_flight
        self.num_running = 0

    @property
    def has_room(self) -> bool:
        """Whether one more may begin."""
        share = self._config.max_ratio * self._num_in_flight()
        return self.num_running < max(self._config.min_at_once, share)

    @contextmanager
    def running(self) -> Generator[None]:
        """Count a retry while the block runs."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
