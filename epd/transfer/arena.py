"""Divides one registered range of memory into regions.

Owns which bytes are free or held, and by whom. Does not own the memory itself (`memory.py`, or a
tensor) nor touch it. Called by the torch engine on its event loop; not thread-safe.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from epd.clock import Clock, SystemClock
from epd.errors import OverloadedError
from epd.transfer.spans import FreeSpans, Span
from epd.transfer.waiting_line import WaitingLine


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


class RegionCache(Protocol):
    """Holds regions of an arena that it can do without when others need the room."""

    def expendable(self) -> Iterator[Region]:
        """Regions that may be taken away, those first that are missed least."""
        ...

    def lose(self, region: Region) -> None:
        """The region has been taken away. Must not call the arena."""
        ...


_Want = tuple[int, str]
"""(nbytes, owner)"""


class Arena:
    """Best-fit allocator of aligned regions, first come first served.

    Args:
        address: start of the range in this process.
        nbytes: its length; capacity is what is left of it after alignment.
        alignment: region addresses are multiples of it, and space is taken in units of it.
        clock: decides when a quarantine is over.
        cache: gives way to those who ask for room, as far as that helps them.
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
        cache: RegionCache | None = None,
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
        self._cache = cache
        self._generations = itertools.count(first_generation)
        self._free = FreeSpans([(first, capacity)])
        self._held: dict[int, Region] = {}
        self._used_bytes = 0
        self._peak_used_bytes = 0
        self._line = WaitingLine[_Want, Region](
            take=self._take, put_back=self._put_back, clock=clock or SystemClock()
        )

    def address_of(self, region: Region) -> int:
        """The absolute address of the region's first byte."""
        return self.address + region.offset

    def find(self, generation: int) -> Region | None:
        """The held region of that generation; None once it was released or quarantined."""
        return self._held.get(generation)

    def try_allocate(self, nbytes: int, owner: str) -> Region | None:
        """A region now, or None: no room, or others have been waiting for longer."""
        return self._line.take_now(self._want(nbytes, owner))

    async def allocate(self, nbytes: int, owner: str, timeout_s: float) -> Region:
        """A region as soon as it is this caller's turn and there is room. Safe to cancel.

        A request at the head of the queue waits for its room while smaller ones behind it wait
        too: a large request is never starved.

        Raises:
            OverloadedError: no room within `timeout_s`.
            ValueError: there can never be: `nbytes` exceeds `capacity_bytes`. Callers look first,
                since it is for them to say what was too large.
        """
        try:
            return await self._line.take(self._want(nbytes, owner), timeout_s)
        except TimeoutError:
            raise OverloadedError(f"no {nbytes} bytes of room within {timeout_s:g} s") from None

    def release(self, region: Region) -> None:
        """Give a held region back.

        Raises:
            ValueError: the region is not held: released twice, or in quarantine.
        """
        self._check_held(region)
        self._line.give_back(region)

    def quarantine(self, region: Region, for_s: float) -> None:
        """Take a held region away from its owner but keep it from others for `for_s` seconds."""
        self._check_held(region)
        self._forget(region)
        self._line.quarantine(region, for_s)

    def serve(self) -> None:
        """Look after those who wait: the cache can do without more than before."""
        self._line.serve()

    def stats(self) -> ArenaStats:
        """Numbers as of now; quarantines that are over count as free."""
        self._line.serve()
        quarantined = self._line.quarantined
        return ArenaStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            quarantined_bytes=sum(self._reserved(region.nbytes) for region in quarantined),
            free_bytes=self._free.nbytes,
            largest_free_bytes=self._free.largest_nbytes,
            peak_used_bytes=self._peak_used_bytes,
            num_regions=len(self._held),
            num_quarantined=len(quarantined),
            num_waiters=len(self._line.wants),
        )

    def _want(self, nbytes: int, owner: str) -> _Want:
        if not 0 < nbytes <= self.capacity_bytes:
            raise ValueError(f"a region of {nbytes} bytes in an arena of {self.capacity_bytes}")
        return nbytes, owner

    def _reserved(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _take(self, want: _Want) -> Region | None:
        nbytes, owner = want
        reserved = self._reserved(nbytes)
        offset = self._free.take(reserved)
        if offset is None and self._cache is not None:
            self._evict(reserved, self._cache)
            offset = self._free.take(reserved)
        if offset is None:
            return None
        region = Region(offset, nbytes, next(self._generations), owner)
        self._held[region.generation] = region
        self._used_bytes += reserved
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        return region

    def _evict(self, reserved: int, cache: RegionCache) -> None:
        """Take away what is in the way of so many bytes; nothing if that would not be enough."""
        regions: dict[int, Region] = {}

        def spans() -> Iterator[Span]:
            for region in cache.expendable():
                regions[region.offset] = region
                yield region.offset, self._reserved(region.nbytes)

        for offset, _ in self._free.in_the_way(reserved, spans()):
            self._put_back(regions[offset])
            cache.lose(regions[offset])

    def _put_back(self, region: Region) -> None:
        if region.generation in self._held:  # unlike after a quarantine
            self._forget(region)
        self._free.add(region.offset, self._reserved(region.nbytes))

    def _forget(self, region: Region) -> None:
        del self._held[region.generation]
        self._used_bytes -= self._reserved(region.nbytes)

    def _check_held(self, region: Region) -> None:
        if self._held.get(region.generation) != region:
            raise ValueError(f"{region} is not held")
