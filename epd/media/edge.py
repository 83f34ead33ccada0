"""Resolves the image references of a request, once, into bytes and facts.

    url ──data:──> decode ─┐
        ──http(s)─> fetch ─┴─> inspect header, hash ──> MediaItem ──> cache (pinned by a lease)

The coordinator calls `resolve_all` for each admitted request and releases the lease at its end.
After that no base64 and no client URL travels further: stages see the content hash only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epd.config import MediaConfig
from epd.errors import EPDError, MediaError, OverloadedError, leaves
from epd.media.cache import MediaCache
from epd.media.data_url import decode_data_url
from epd.media.fetch import Fetcher
from epd.media.item import MediaItem, build_item
from epd.media.lease import MediaLease
from epd.media.single_flight import SingleFlight

_OFF_LOOP_BYTES = 2**20  # hashing one MiB takes about a millisecond; more is done in a thread


class MediaEdge:
    """The one door through which images enter the coordinator.

    Owns the fetcher (closed with the edge) but not the cache, which also serves the workers.
    """

    def __init__(self, limits: MediaConfig, cache: MediaCache, fetcher: Fetcher) -> None:
        self._limits = limits
        self._cache = cache
        self._fetcher = fetcher
        self._flights: SingleFlight[MediaItem] = SingleFlight()
        self._slots = asyncio.Semaphore(limits.max_concurrent_fetches)

    @property
    def num_fetches(self) -> int:
        """Fetches under way, those waiting for a slot included."""
        return self._flights.num_running

    async def resolve(self, url: str, *, param: str) -> MediaItem:
        """The image behind a data or http(s) URL, also put in the cache (unpinned).

        Requests that name the same URL at the same time share one fetch.

        Args:
            url: as the client sent it.
            param: the request field that holds `url`, for errors: `messages[0].content[1]…`.

        Raises:
            MediaError: the reference or the image is not acceptable; `param` says which.
            OverloadedError: no room or no fetch slot in time.
        """
        item = await self._resolve(url, param)
        self._cache.put(item)
        return item

    async def resolve_all(self, parts: Sequence[tuple[str, str]]) -> MediaLease:
        """Resolve all `(url, param)` of one request concurrently; the first error cancels the rest.

        Each image is pinned as it arrives, so bytes of running requests stay within the cache's
        budget. The caller releases the lease; on an error or cancellation nothing stays pinned.

        Raises:
            MediaError: too many images, too many bytes together, or see `resolve`.
            OverloadedError: see `resolve`.
        """
        max_images = self._limits.max_images_per_request
        if len(parts) > max_images:
            raise MediaError(
                f"the request has {len(parts)} images, more than the {max_images} allowed",
                param=parts[max_images][1],
            )
        lease = MediaLease(self._cache, len(parts))
        try:
            async with asyncio.TaskGroup() as group:
                for position, (url, param) in enumerate(parts):
                    group.create_task(self._hold(lease, position, url, param))
        except BaseException as exc:
            lease.release()
            if isinstance(exc, BaseExceptionGroup):
                raise leaves(exc)[0] from None
            raise
        return lease

    async def close(self) -> None:
        """Stop the fetches under way and close the fetcher."""
        await self._flights.close()
        await self._fetcher.close()

    async def _hold(self, lease: MediaLease, position: int, url: str, param: str) -> None:
        item = await self._resolve(url, param)
        try:
            lease.hold(position, item)
        except OverloadedError:
            if lease.num_bytes + item.num_bytes > self._cache.max_bytes:
                raise MediaError(
                    f"the request's images have more than {self._cache.max_bytes} bytes together: "
                    "send fewer or smaller ones",
                    param=param,
                ) from None
            raise

    async def _resolve(self, url: str, param: str) -> MediaItem:
        try:
            return await self._resolve_shared(url)
        except EPDError as exc:
            # A new object per caller: a shared fetch has as many fields at fault as callers.
            raise type(exc)(exc.message, param=param, retry_after_s=exc.retry_after_s) from exc

    async def _resolve_shared(self, url: str) -> MediaItem:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            if len(url) <= _OFF_LOOP_BYTES:
                return self._decode(url)
            return await asyncio.to_thread(self._decode, url)
        if scheme in ("http", "https"):
            return await self._flights.run(url, lambda: self._fetch(url))
        raise MediaError("the image URL must start with http://, https:// or data:")

    def _decode(self, url: str) -> MediaItem:
        data = decode_data_url(url, max_bytes=self._limits.max_bytes)
        return build_item(data, max_pixels=self._limits.max_pixels)

    async def _fetch(self, url: str) -> MediaItem:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise OverloadedError("too many image fetches are under way: retry later") from exc
        try:
            data = await self._fetcher.fetch(url)
            max_pixels = self._limits.max_pixels
            if len(data) <= _OFF_LOOP_BYTES:
                return build_item(data, max_pixels=max_pixels)
            return await asyncio.to_thread(build_item, data, max_pixels=max_pixels)
        finally:
            self._slots.release()
