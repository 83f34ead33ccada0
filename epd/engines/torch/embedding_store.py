"""The encode worker's embeddings: a byte-budgeted arena that is also a cache by content.

An entry is pinned while it is encoded for somebody, and while it is sent; both end by themselves.
In between it is only held, until its prefill worker sends for it: when it is in the way of others
it goes, and is encoded again once it is sent for. Were it kept, requests that hold some of their
images here and wait for room for the rest could wait for each other for ever. What nobody holds
goes first, as in any cache.

An image that is wanted twice at the same time is encoded once; who no longer wants it leaves, and
the last to leave stops it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from encoders import ImageGrid
from epd.clock import Clock
from epd.errors import MediaError, WorkerError
from epd.transfer import Arena, Region


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an image's embeddings lie, `[num_tokens, hidden_size]`."""

    region: Region
    grid: ImageGrid
    num_tokens: int


@dataclass(slots=True, eq=False)
class Entry:
    """One image, encoded or being encoded."""

    key: str
    task: asyncio.Task[Stored]
    num_pins: int = 0

    async def stored(self) -> Stored:
        """The embeddings, once they are there. The caller holds a pin.

        Raises:
            EPDError: the image could not be encoded.
        """
        await asyncio.wait((self.task,))  # unlike awaiting it, leaving does not cancel it
        if self.task.cancelled():
            raise WorkerError("the encode worker stopped encoding this image")
        return self.task.result()


class EmbeddingStore:
    """Owns the entries and their regions. Used on the event loop only.

    Args:
        address: start of the arena's memory.
        nbytes: its length.
        clock: the arena's.
    """

    def __init__(self, address: int, nbytes: int, clock: Clock) -> None:
        self.arena = Arena(address, nbytes, clock=clock, cache=self)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._holds = Counter[str]()
        self._num_needs = 0
        """Pins and holds."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def needed_bytes(self) -> int:
        """Bytes of embeddings that somebody pins or holds."""
        return sum(
            entry.task.result().region.nbytes
            for entry in self._entries.values()
            if _is_stored(entry) and (entry.num_pins or self._holds[entry.key])
        )

    async def wait_idle(self) -> None:
        """Return when nobody pins or holds anything."""
        await self._idle.wait()

    def hold(self, key: str) -> None:
        """Somebody will send for the image: what nobody holds goes before it."""
        self._holds[key] += 1
        self._count_needs(+1)

    def let_go(self, key: str) -> None:
        """End a hold; the image need not be here any more."""
        assert self._holds[key] > 0, "let go more often than held"
        self._holds -= Counter((key,))  # unlike subtract(), forgets what is down to zero
        self._count_needs(-1)

    def pin(self, key: str, encode: Callable[[], Awaitable[Stored]]) -> tuple[Entry, bool]:
        """The entry of `key`, pinned, and whether it was there or under way already.

        If it was not, `encode` is started in a task; it must take its region from `reserve` and
        give it back if it fails.
        """
        entry = self._entries.get(key)
        is_hit = entry is not None
        if entry is None:
            entry = self._start(key, encode)
        entry.num_pins += 1
        self._count_needs(+1)
        return entry, is_hit

    def unpin(self, entry: Entry) -> None:
        assert entry.num_pins > 0, "unpinned more often than pinned"
        entry.num_pins -= 1
        self._count_needs(-1)
        if entry.num_pins:
            return
        if not entry.task.done():
            self._forget(entry)  # a newcomer must not join what is being stopped
            entry.task.cancel()
        elif _is_stored(entry) and self._entries.get(entry.key) is entry:
            self._entries.move_to_end(entry.key)
            self.arena.serve()

    async def reserve(self, nbytes: int, key: str, timeout_s: float) -> Region:
        """Room for the image of `key`, at the expense of those that nobody pins.

        Raises:
            MediaError: the image would not fit an empty arena.
            OverloadedError: no room within `timeout_s`.
        """
        if nbytes > self.arena.capacity_bytes:
            raise MediaError(
                f"the image's embeddings take {nbytes} bytes, more than the "
                f"{self.arena.capacity_bytes} of an encode worker (embedding_bytes): send a "
                "smaller image"
            )
        return await self.arena.allocate(nbytes, key, timeout_s)

    def expendable(self) -> Iterator[Region]:
        """What nobody holds, the least recently used first; then what came last. See `RegionCache`.

        Of what is held the latest goes, so that requests before it keep what they have.
        """
        unpinned = [e for e in self._entries.values() if not e.num_pins and _is_stored(e)]
        unheld = (entry for entry in unpinned if not self._holds[entry.key])
        held = (entry for entry in reversed(unpinned) if self._holds[entry.key])
        for entry in chain(unheld, held):
            yield entry.task.result().region

    def lose(self, region: Region) -> None:
        """See `RegionCache`."""
        del self._entries[region.owner]

    async def close(self) -> None:
        """Stop what is being encoded."""
        tasks = [entry.task for entry in self._entries.values() if not entry.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, encode: Callable[[], Awaitable[Stored]]) -> Entry:
        async def run() -> Stored:
            return await encode()

        entry = self._entries[key] = Entry(key, asyncio.create_task(run(), name=f"encode {key}"))
        entry.task.add_done_callback(lambda task: self._ended(entry))
        return entry

    def _ended(self, entry: Entry) -> None:
        if entry.task.cancelled() or entry.task.exception() is not None:
            self._forget(entry)
        elif self._entries.get(entry.key) is not entry:
            # It was given up, but finished all the same.
            self.arena.release(entry.task.result().region)

    def _count_needs(self, change: int) -> None:
        self._num_needs += change
        if self._num_needs:
            self._idle.clear()
        else:
            self._idle.set()

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


def _is_stored(entry: Entry) -> bool:
    task = entry.task
    return task.done() and not task.cancelled() and task.exception() is None
