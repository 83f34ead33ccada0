"""Keeps resolved images within a byte budget: least recently used out, pinned ones never.

Encode workers fetch an image from the coordinator by its content hash, so what a running request
needs must stay: the request pins it and unpins it when it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from epd.errors import OverloadedError
from epd.media.item import MediaItem


@dataclass(slots=True)
class _Entry:
    item: MediaItem
    num_pins: int = 0


class MediaCache:
    """A byte-budgeted LRU of `MediaItem` by content hash. For use on one event loop only.

    Invariants: `used_bytes <= max_bytes`; an entry with a pin is not evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._pinned_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._pinned_bytes

    @property
    def num_items(self) -> int:
        return len(self._entries)

    def get(self, content_hash: str) -> MediaItem | None:
        """The image, now the most recently used; None if it is not (or no longer) here."""
        entry = self._entries.get(content_hash)
        if entry is None:
            return None
        self._entries.move_to_end(content_hash)
        return entry.item

    def put(self, item: MediaItem) -> None:
        """Keep `item` while there is room for it.

        Raises:
            OverloadedError: what is pinned leaves no room.
        """
        self._admit(item)

    def pin(self, item: MediaItem) -> None:
        """Keep `item` until as many `unpin` calls; puts it first if it is not here.

        Raises:
            OverloadedError: what is pinned leaves no room.
        """
        entry = self._admit(item)
        if entry.num_pins == 0:
            self._pinned_bytes += item.num_bytes
        entry.num_pins += 1

    def unpin(self, content_hash: str) -> None:
        """Undo one `pin`. The image stays until its room is needed."""
        entry = self._entries.get(content_hash)
        assert entry is not None and entry.num_pins > 0, "unpin without pin"
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._pinned_bytes -= entry.item.num_bytes

    def _admit(self, item: MediaItem) -> _Entry:
        entry = self._entries.get(item.content_hash)
        if entry is None:
            self._make_room(item.num_bytes)
            entry = self._entries[item.content_hash] = _Entry(item)
            self._used_bytes += item.num_bytes
        self._entries.move_to_end(item.content_hash)
        return entry

    def _make_room(self, num_bytes: int) -> None:
        if self._pinned_bytes + num_bytes > self.max_bytes:
            raise OverloadedError(
                "the images of running requests fill the media cache: retry in a moment",
                retry_after_s=1.0,
            )
        excess = self._used_bytes + num_bytes - self.max_bytes
        victims: list[str] = []
        for content_hash, entry in self._entries.items():
            if excess <= 0:
                break
            if entry.num_pins == 0:
                victims.append(content_hash)
                excess -= entry.item.num_bytes
        for content_hash in victims:
            self._used_bytes -= self._entries.pop(content_hash).item.num_bytes
