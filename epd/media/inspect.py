"""Turns an image file's header into facts, and refuses what must not reach a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import MediaError
from epd.media.containers import read_header, truncated
from epd.media.orientation import is_transposed


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Size as shown (EXIF orientation applied), type and number of frames of an image file."""

    width: int
    height: int
    mime: str
    num_frames: int = 1


def inspect_image(data: bytes, *, max_pixels: int) -> ImageFacts:
    """Read the facts of an image file from its header, in time linear in its bytes.

    No pixel is decoded and no pixel-sized memory is allocated, whatever size the header claims.

    Raises:
        MediaError: no image, an empty or truncated one, or one of more than `max_pixels`.
    """
    if not data:
        raise MediaError("the image file is empty")
    header = read_header(data)
    if header.width == 0 or header.height == 0:
        raise MediaError(f"the image has no pixels ({header.width} x {header.height})")
    num_pixels = header.width * header.height
    if num_pixels > max_pixels:
        raise MediaError(
            f"the image has {header.width} x {header.height} = {num_pixels} pixels, "
            f"more than the {max_pixels} allowed: send a smaller one"
        )
    if not header.is_complete:
        raise truncated()
    width, height = header.width, header.height
    if is_transposed(header.exif):
        width, height = height, width
    return ImageFacts(width, height, header.mime, header.num_frames)
