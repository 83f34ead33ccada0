"""How fast a stage works, measured by what it finishes, and how much it has been given.

A coordinator that sees a stage idle knows only that it is at least so fast. So a measurement may
lower the speed only if work was held back for the stage while it was made; any may raise it.
What is refused because of the speed needs more: two such measurements in a row that agree.
"""

from __future__ import annotations

import math

from epd.types import RequestClass

_WINDOW_S = 1.0  # of work; a shorter one would measure the size of batches
_HORIZON_S = 3.0  # over which measurements are averaged
_HELD_RATIO = 0.8
_AGREEMENT_RATIO = 0.25


class StageMeter:
    """One stage of one model. Tokens are those of the stage.

    Args:
        now_s: monotonic time, as in each call.
    """

    def __init__(self, now_s: float) -> None:
        self.num_workers = 0
        """That are ready."""
        self.capacity_tokens = 0
        """KV that decode workers hold; 0 if it is not known, or the stage is another."""
        self.num_present = 0
        """Requests that it works on, or could, as the stage before has done its part."""
        self.num_given = 0
        self.tokens_given = 0
        """Of requests that it will work on too, as they are at the stage before."""
        self.tokens_by_class = dict.fromkeys(RequestClass, 0)
        self.num_by_class = dict.fromkeys(RequestClass, 0)
        self.rate: float | None = None
        """Tokens/s of one worker; None until it has been measured."""
        self.is_settled = False
        """Whether requests may be refused because of `rate`."""
        self._held_by: RequestClass | None = None
        self._seen_s = now_s
        self._busy_s = 0.0
        self._held_s = dict.fromkeys(RequestClass, 0.0)
        self._done_tokens = 0
        self._last_sample: float | None = None

    @property
    def capacity(self) -> float | None:
        """Tokens/s of all workers together; None if it is not known or there are none."""
        return self.rate * self.num_workers if self.rate and self.num_workers else None

    def seconds(self, tokens: float) -> float:
        """How long the stage works on `tokens`; 0 if its speed is not known."""
        capacity = self.capacity
        return tokens / capacity if capacity else 0.0

    def give(self, now_s: float, request_class: RequestClass, tokens: int) -> None:
        """The stage has a request's work to do from now on, once it is there."""
        self._advance(now_s)
        self._add(request_class, 1, tokens)

    def start(self, now_s: float) -> None:
        """It is there."""
        self._advance(now_s)
        self.num_present += 1

    def take_back(
        self, now_s: float, request_class: RequestClass, tokens: int, *, is_done: bool
    ) -> None:
        """What is there is done, or its request has ended."""
        self._advance(now_s)
        self._add(request_class, -1, -tokens)
        self.num_present -= 1
        if is_done:
            self._done_tokens += tokens
            if self._busy_s >= _WINDOW_S and self._done_tokens:
                self._measure()

    def hold(self, now_s: float, request_class: RequestClass | None) -> None:
        """Requests of a class wait for room at the stage from now on; None if none do."""
        self._advance(now_s)
        self._held_by = request_class

    def _add(self, request_class: RequestClass, num: int, tokens: int) -> None:
        self.num_given += num
        self.tokens_given += tokens
        self.num_by_class[request_class] += num
        self.tokens_by_class[request_class] += tokens

    def _advance(self, now_s: float) -> None:
        if self.num_present:
            passed_s = now_s - self._seen_s
            self._busy_s += passed_s
            if self._held_by is not None:
                self._held_s[self._held_by] += passed_s
        self._seen_s = now_s

    def _measure(self) -> None:
        sample = self._done_tokens / self._busy_s / max(1, self.num_workers)
        needed_s = _HELD_RATIO * self._busy_s
        if self.rate is None:
            self.rate = sample
        elif sum(self._held_s.values()) >= needed_s:
            weight = 1 - math.exp(-self._busy_s / _HORIZON_S)
            self.rate += weight * (sample - self.rate)
        else:
            self.rate = max(self.rate, sample)
        if self._held_s[RequestClass.INTERACTIVE] >= needed_s:
            last = self._last_sample
            self.is_settled = last is not None and abs(sample - last) <= _AGREEMENT_RATIO * last
            self._last_sample = sample
        elif sum(self._held_s.values()) >= needed_s:
            # Batch is held back early, perhaps long before the workers are as fast as they can be.
            self.is_settled, self._last_sample = False, None
        self._busy_s, self._done_tokens = 0.0, 0
        self._held_s = dict.fromkeys(RequestClass, 0.0)
