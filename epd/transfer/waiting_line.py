"""Who waits for room in a pool, in order of arrival, and what of the pool is in quarantine.

Regions of an arena and blocks of a KV cache are lent through it. How room is found, and how it is
given back, is the pool's business. Used on one event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from epd.clock import Clock

WantT = TypeVar("WantT")
LentT = TypeVar("LentT")


@dataclass(slots=True, eq=False)
class _Waiter(Generic[WantT, LentT]):
    want: WantT
    granted: asyncio.Future[LentT] = field(repr=False)


class WaitingLine(Generic[WantT, LentT]):
    """First come, first served: who stands at the head and wants much is never overtaken.

    Args:
        take: what fulfils a want now, or None; must not call back.
        put_back: makes room again.
        clock: decides when a quarantine is over.
    """

    def __init__(
        self,
        *,
        take: Callable[[WantT], LentT | None],
        put_back: Callable[[LentT], None],
        clock: Clock,
    ) -> None:
        self._take = take
        self._put_back = put_back
        self._clock = clock
        self._waiters: deque[_Waiter[WantT, LentT]] = deque()
        self._quarantined: list[tuple[float, LentT]] = []  # (over at, what)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def wants(self) -> list[WantT]:
        """What those in line want, from the head on."""
        return [waiter.want for waiter in self._waiters]

    @property
    def quarantined(self) -> list[LentT]:
        """What is in quarantine now."""
        self._end_quarantines()
        return [lent for _, lent in self._quarantined]

    def take_now(self, want: WantT) -> LentT | None:
        """What fulfils `want`, or None: there is no room, or others have waited for longer."""
        self._end_quarantines()
        return None if self._waiters else self._take(want)

    async def take(self, want: WantT, timeout_s: float) -> LentT:
        """What fulfils `want`, when it is this caller's turn and there is room. Safe to cancel.

        Raises:
            TimeoutError: no room within `timeout_s`.
        """
        lent = self.take_now(want)
        if lent is not None:
            return lent
        waiter = _Waiter[WantT, LentT](want, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.granted
        except BaseException:
            self._withdraw(waiter)
            raise

    def give_back(self, lent: LentT) -> None:
        self._put_back(lent)
        self.serve()

    def quarantine(self, lent: LentT, for_s: float) -> None:
        """Give back, but keep from everybody for `for_s` seconds."""
        self._quarantined.append((self._clock.monotonic() + for_s, lent))
        self.serve()

    def serve(self) -> None:
        """Grant in order, as far as the room goes. To be called when there may be more room."""
        self._end_quarantines()
        while self._waiters:
            waiter = self._waiters[0]
            # A cancelled waiter is still in the line until its task has run.
            if not waiter.granted.done():
                lent = self._take(waiter.want)
                if lent is None:
                    break
                waiter.granted.set_result(lent)
            self._waiters.popleft()
        self._arm_timer()

    def _end_quarantines(self) -> None:
        now = self._clock.monotonic()
        over = [lent for until, lent in self._quarantined if until <= now]
        if over:
            self._quarantined = [entry for entry in self._quarantined if entry[0] > now]
            for lent in over:
                self._put_back(lent)

    def _arm_timer(self) -> None:
        """Wake up at the next end of a quarantine, if someone is waiting for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters and self._quarantined:
            remaining_s = min(until for until, _ in self._quarantined) - self._clock.monotonic()
            loop = asyncio.get_running_loop()
            # Not sooner than 1 ms: a loop timer may fire a little before the clock says so.
            self._timer = loop.call_later(max(remaining_s, 0.001), self.serve)

    def _withdraw(self, waiter: _Waiter[WantT, LentT]) -> None:
        """Leave the line; what was granted in the same moment goes to the next."""
        if waiter.granted.done() and not waiter.granted.cancelled():
            self.give_back(waiter.granted.result())
            return
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self.serve()
