"""Divides one registered range of memory into regions.

Owns which bytes are free, held or in quarantine, and who waits for room. Does not own the memory
itself (`memory.py`, or a tensor) nor touch it. Called by the torch and sim engines on their event
loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from epd.clock import Clock, SystemClock
from epd.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class Region:
    """A held part of an arena. A descriptor sent to a peer carries `generation` along."""

    offset: int
    nbytes: int
    generation: int
    owner: str


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot; used + quarantined + free = capacity, all in whole alignment units."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    free_bytes: int
    largest_free_bytes: int
    peak_used_bytes: int
    num_regions: int
    num_quarantined: int
    num_waiters: int


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    owner: str
    granted: asyncio.Future[Region] = field(repr=False)


class Arena:
    """Best-fit allocator of aligned regions, first come first served.

    Args:
        address: start of the range in this process.
        nbytes: its length; capacity is what is left of it after alignment.
        alignment: region addresses are multiples of it, and space is taken in units of it.
        clock: decides when a quarantine is over.
        first_generation: u64; start from something unique to the process (its epoch, say) where
            a stale descriptor of an earlier process could otherwise match.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        alignment: int = 256,
        clock: Clock | None = None,
        first_generation: int = 1,
    ) -> None:
        if alignment < 1:
            raise ValueError(f"alignment must be positive, not {alignment}")
        first = -address % alignment
        capacity = (nbytes - first) // alignment * alignment
        if capacity <= 0:
            raise ValueError(f"{nbytes} bytes hold no region aligned to {alignment}")
        self.address = address
        self.alignment = alignment
        self.capacity_bytes = capacity
        self._clock = clock or SystemClock()
        self._generations = itertools.count(first_generation)
        self._free: list[tuple[int, int]] = [(first, capacity)]  # (offset, nbytes), by offset
        self._held: dict[int, Region] = {}
        self._quarantined: list[tuple[float, Region]] = []  # (over at, region)
        self._used_bytes = 0
        self._peak_used_bytes = 0
        self._waiters: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def address_of(self, region: Region) -> int:
        """The absolute address of the region's first byte."""
        return self.address + region.offset

    def find(self, generation: int) -> Region | None:
        """The held region of that generation; None once it was released or quarantined."""
        return self._held.get(generation)

    def try_allocate(self, nbytes: int, owner: str) -> Region | None:
        """A region now, or None: no room, or others have been waiting for longer."""
        if nbytes <= 0:
            raise ValueError(f"a region needs at least one byte, not {nbytes}")
        self._reap()
        return None if self._waiters else self._take(nbytes, owner)

    async def allocate(self, nbytes: int, owner: str, timeout_s: float) -> Region:
        """A region as soon as it is this caller's turn and there is room. Safe to cancel.

        A request at the head of the queue waits for its room while smaller ones behind it wait
        too: a large request is never starved.

        Raises:
            OverloadedError: no room within `timeout_s`, or `nbytes` exceeds the whole arena.
        """
        if self._reserved(nbytes) > self.capacity_bytes:
            raise OverloadedError(f"{nbytes} bytes do not fit an arena of {self.capacity_bytes}")
        region = self.try_allocate(nbytes, owner)
        if region is not None:
            return region
        waiter = _Waiter(nbytes, owner, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.granted
        except TimeoutError:
            self._withdraw(waiter)
            raise OverloadedError(f"no {nbytes} bytes of room within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def release(self, region: Region) -> None:
        """Give a held region back.

        Raises:
            ValueError: the region is not held: released twice, or in quarantine.
        """
        self._drop(region)
        self._put_back(region)
        self._serve()

    def quarantine(self, region: Region, for_s: float) -> None:
        """Take a held region away from its owner but keep it from others for `for_s` seconds."""
        self._drop(region)
        self._quarantined.append((self._clock.monotonic() + for_s, region))
        self._serve()

    def stats(self) -> ArenaStats:
        """Numbers as of now; quarantines that are over count as free."""
        self._serve()
        quarantined = sum(self._reserved(region.nbytes) for _, region in self._quarantined)
        return ArenaStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            quarantined_bytes=quarantined,
            free_bytes=sum(nbytes for _, nbytes in self._free),
            largest_free_bytes=max((nbytes for _, nbytes in self._free), default=0),
            peak_used_bytes=self._peak_used_bytes,
            num_regions=len(self._held),
            num_quarantined=len(self._quarantined),
            num_waiters=len(self._waiters),
        )

    def _reserved(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _take(self, nbytes: int, owner: str) -> Region | None:
        reserved = self._reserved(nbytes)
        fitting = (span for span in self._free if span[1] >= reserved)
        best = min(fitting, key=lambda span: span[1], default=None)
        if best is None:
            return None
        index = bisect_left(self._free, best)
        offset, available = best
        if available == reserved:
            del self._free[index]
        else:
            self._free[index] = (offset + reserved, available - reserved)
        region = Region(offset, nbytes, next(self._generations), owner)
        self._held[region.generation] = region
        self._used_bytes += reserved
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        return region

    def _drop(self, region: Region) -> None:
        if self._held.get(region.generation) != region:
            raise ValueError(f"{region} is not held")
        del self._held[region.generation]
        self._used_bytes -= self._reserved(region.nbytes)

    def _put_back(self, region: Region) -> None:
        """Return the bytes to the free list, joined with the free neighbours."""
        offset, nbytes = region.offset, self._reserved(region.nbytes)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            before = self._free.pop(index - 1)
            offset, nbytes = before[0], before[1] + nbytes
        insort(self._free, (offset, nbytes))

    def _reap(self) -> None:
        """Free the quarantined regions whose time is over."""
        now = self._clock.monotonic()
        over = [region for until, region in self._quarantined if until <= now]
        if over:
            self._quarantined = [entry for entry in self._quarantined if entry[0] > now]
            for region in over:
                self._put_back(region)

    def _serve(self) -> None:
        """Grant regions to waiters in order, as far as the room goes."""
        self._reap()
        while self._waiters:
            waiter = self._waiters[0]
            # A cancelled waiter is still in the queue until its task has run.
            if not waiter.granted.done():
                region = self._take(waiter.nbytes, waiter.owner)
                if region is None:
                    break
                waiter.granted.set_result(region)
            self._waiters.popleft()
        self._arm_timer()

    def _arm_timer(self) -> None:
        """Wake up at the next end of a quarantine, if someone is waiting for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters and self._quarantined:
            remaining_s = min(until for until, _ in self._quarantined) - self._clock.monotonic()
            loop = asyncio.get_running_loop()
            # Not sooner than 1 ms: a loop timer may fire a little before the clock says so.
            self._timer = loop.call_later(max(remaining_s, 0.001), self._serve)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave the queue; a region granted in the same moment goes to the next in line."""
        if waiter.granted.done() and not waiter.granted.cancelled():
            self.release(waiter.granted.result())
            return
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._serve()
