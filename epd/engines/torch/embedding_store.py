"""The encode worker's embeddings: a byte-budgeted arena that is also a cache by content.

An entry is pinned by everybody who waits for it or holds it for a prefill worker; an unpinned one
stays as a cache until it is in the way, least recently used first. An image that is wanted twice
at the same time is encoded once; who no longer wants it leaves, and the last to leave stops it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

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
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_pinned = 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of embeddings that somebody waits for or holds."""
        return sum(
            entry.task.result().region.nbytes
            for entry in self._entries.values()
            if entry.num_pins and _is_stored(entry)
        )

    async def wait_unpinned(self) -> None:
        """Return when nobody waits for or holds anything."""
        await self._idle.wait()

    def pin(self, key: str, encode: Callable[[], Awaitable[Stored]]) -> tuple[Entry, bool]:
        """The entry of `key`, pinned, and whether it was there or under way already.

        If it was not, `encode` is started in a task; it must take its region from `reserve` and
        give it back if it fails.
        """
        entry = self._entries.get(key)
        is_hit = entry is not None
        if entry is None:
            entry = self._start(key, encode)
        self.add_pin(entry)
        return entry, is_hit

    def add_pin(self, entry: Entry) -> None:
        if entry.num_pins == 0:
            self._num_pinned += 1
            self._idle.clear()
        entry.num_pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.num_pins > 0, "unpinned more often than pinned"
        entry.num_pins -= 1
        if entry.num_pins:
            return
        self._num_pinned -= 1
        if not self._num_pinned:
            self._idle.set()
        if not entry.task.done():
            self._forget(entry)  # a newcomer must not join what is being stopped
            entry.task.cancel()
        elif _is_stored(entry) and self._entries.get(entry.key) is entry:
            self._entries.move_to_end(entry.key)
            self.arena.serve()

    async def reserve(self, nbytes: int, key: str, timeout_s: float) -> Region:
        """Room for the image of `key`, at the expense of cached ones that nobody holds.

        Raises:
            MediaError: the image would not fit an empty arena.
            OverloadedError: no room within `timeout_s`.
        """
        if nbytes > self.arena.capacity_bytes:
            raise MediaError(
                f"the image's embeddings take {nbytes} bytes, more than this deployment's "
                f"{self.arena.capacity_bytes}: send a smaller image"
            )
        return await self.arena.allocate(nbytes, key, timeout_s)

    def expendable(self) -> Iterator[Region]:
        """Of images that nobody holds, the least recently used first. See `RegionCache`."""
        for entry in self._entries.values():
            if not entry.num_pins and _is_stored(entry):
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

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


def _is_stored(entry: Entry) -> bool:
    task = entry.task
    return task.done() and not task.cancelled() and task.exception() is None
