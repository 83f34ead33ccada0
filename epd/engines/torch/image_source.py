"""Gets an image's bytes to the encode worker: from the coordinator's media URL or a data URL."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from epd.errors import BadRequestError, DeadlineError, MediaError, WorkerError
from epd.media.data_url import decode_data_url
from epd.wire import bare_hash

MAX_IMAGE_BYTES = 64 * 2**20
"""A backstop; the coordinator's own limit, set by its operator, is lower."""
_MEDIA_PATH = "/internal/media/"


class ImageReference:
    """One `mm_item` of an encode request: a URL, and perhaps the hash of what it gives."""

    def __init__(self, item: str | dict[str, Any]) -> None:
        """Raises BadRequestError if the item has no URL."""
        fields = {"url": item} if isinstance(item, str) else item
        url, content_hash = fields.get("url"), fields.get("content_hash")
        if not isinstance(url, str) or not url:
            raise BadRequestError("an mm_item is a URL or an object with one", param="mm_items")
        self.url = url
        self.content_hash = bare_hash(content_hash) if isinstance(content_hash, str) else None


async def fetch_image(
    session: aiohttp.ClientSession, reference: ImageReference, timeout_s: float
) -> bytes:
    """The image's bytes, verified against the reference's hash if it has one.

    Only the coordinator's signed media URLs are fetched: resolving what a client wrote, with all
    the checks that takes, is the coordinator's job.

    Raises:
        MediaError: a URL of another kind, too many bytes, or other bytes than promised.
        DeadlineError, WorkerError: the coordinator did not give it.
    """
    if reference.url[:5].lower() == "data:":
        data = await asyncio.to_thread(decode_data_url, reference.url, max_bytes=MAX_IMAGE_BYTES)
    else:
        data = await _download(session, reference.url, timeout_s)
    if reference.content_hash is not None:
        actual = await asyncio.to_thread(content_hash_of, data)
        if actual != reference.content_hash:
            raise WorkerError("the image is not the one its content_hash names")
    return data


def content_hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _download(session: aiohttp.ClientSession, url: str, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.path.startswith(_MEDIA_PATH):
        raise MediaError("the encode worker reads data URLs and the coordinator's media URLs only")
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise WorkerError(f"the coordinator's media URL answered {response.status}")
            return await _read_bounded(response)
    except TimeoutError:
        raise DeadlineError(f"the image was not fetched within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as exc:
        raise WorkerError("the coordinator cannot be reached for the image") from exc


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in response.content.iter_any():
        num_bytes += len(chunk)
        if num_bytes > MAX_IMAGE_BYTES:
            raise MediaError(f"the image has more than {MAX_IMAGE_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
