"""An image as it travels through the coordinator: its bytes, their hash and their facts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from epd.media.inspect import inspect_image


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One resolved image.

    Attributes:
        content_hash: SHA-256 of `data`, 64 hex digits.
        data: the encoded file, never logged (not part of `repr`).
        mime: found from the bytes, not from what the client or a server claims.
        width: pixels as shown.
        height: pixels as shown.
    """

    content_hash: str
    data: bytes = field(repr=False)
    mime: str
    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def build_item(data: bytes, *, max_pixels: int) -> MediaItem:
    """Inspect and hash a file. Takes milliseconds per MiB: use a thread for large ones.

    Raises:
        MediaError: see `inspect_image`.
    """
    facts = inspect_image(data, max_pixels=max_pixels)
    content_hash = hashlib.sha256(data).hexdigest()
    return MediaItem(content_hash, data, facts.mime, facts.width, facts.height)
