"""The hold that one request has on its images in the cache."""

from __future__ import annotations

from epd.media.cache import MediaCache
from epd.media.item import MediaItem


class MediaLease:
    """Pins the images of one request until `release`, which belongs in a `finally`.

    The same picture shown twice is two items and one pin.
    """

    def __init__(self, cache: MediaCache, num_items: int) -> None:
        self._cache = cache
        self._items: list[MediaItem | None] = [None] * num_items
        self._pinned: dict[str, int] = {}  # content hash → bytes

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The images in the order of the request's parts."""
        items = tuple(item for item in self._items if item is not None)
        assert len(items) == len(self._items), "an image is still being resolved"
        return items

    @property
    def num_bytes(self) -> int:
        """Of the distinct images held."""
        return sum(self._pinned.values())

    def __enter__(self) -> MediaLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self, position: int, item: MediaItem) -> None:
        """Pin `item` as the request's image at `position`.

        Raises:
            OverloadedError: see `MediaCache.pin`.
        """
        if item.content_hash not in self._pinned:
            self._cache.pin(item)
            self._pinned[item.content_hash] = item.num_bytes
        self._items[position] = item

    def release(self) -> None:
        """Unpin all; the items stay readable. Further calls do nothing."""
        for content_hash in self._pinned:
            self._cache.unpin(content_hash)
        self._pinned.clear()
