"""Reads the header of an image file without decoding it. Pure: bytes in, `Header` out.

It walks the container (chunks, segments, blocks) and nothing else. Pillow is not used here on
purpose: its openers of GIF and WebP allocate the canvas, its PNG orientation needs the pixels, its
bomb check is one process-wide number, and it warns through global state. The tests hold this
module's answers against Pillow's, which the encode workers decode with.

The walk also tells whether the file is whole, so that a picture cut in half is the client's error
at once and not a worker's error later.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from struct import unpack_from

from epd.errors import MediaError

# More top-level blocks than any real file of the accepted sizes has; bounds the walk's time.
_MAX_BLOCKS = 200_000


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        mime: such as `image/png`.
        width: pixels as stored, before any EXIF rotation; may be 0 in a broken file.
        height: like `width`.
        num_frames: 1 for a still image.
        exif: the raw EXIF block, empty if there is none.
        is_complete: whether the file reaches the end its format demands.
    """

    mime: str
    width: int
    height: int
    num_frames: int = 1
    exif: bytes = b""
    is_complete: bool = True


def read_header(data: bytes) -> Header:
    """Read the header of a PNG, JPEG, WebP, GIF or BMP file.

    Raises:
        MediaError: another format, or a header that is cut off or makes no sense.
    """
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _read_png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _read_gif(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _read_webp(data)
        if data.startswith(b"BM"):
            return _read_bmp(data)
    except struct.error:
        raise truncated() from None
    raise MediaError(
        "this is not an image that can be read: send a PNG, JPEG, WebP, GIF or BMP file"
    )


def truncated() -> MediaError:
    return MediaError("the image file is truncated: send the whole file")


def _broken(kind: str) -> MediaError:
    return MediaError(f"the {kind} file is damaged: save it again with another program")


def _read_png(data: bytes) -> Header:
    first, width, height = unpack_from(">4sII", data, 12)
    if first != b"IHDR":
        raise _broken("PNG")
    exif, num_frames, has_pixels, is_complete = b"", 1, False, False
    position = 8
    for _ in range(_MAX_BLOCKS):
        if position + 12 > len(data):
            break
        length, kind = unpack_from(">I4s", data, position)
        body = position + 8
        position = body + length + 4  # the checksum follows the body
        if kind == b"IDAT":
            has_pixels = True
        elif kind == b"eXIf":
            exif = data[body : body + length]
        elif kind == b"acTL" and length >= 4:
            num_frames = max(1, unpack_from(">I", data, body)[0])
        elif kind == b"IEND":
            is_complete = has_pixels and position <= len(data)
            break
    return Header("image/png", width, height, num_frames, exif, is_complete)


_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])", re.DOTALL)
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 … SOF15
_JPEG_SCAN, _JPEG_END, _JPEG_APP1 = 0xDA, 0xD9, 0xE1
_JPEG_BARE = frozenset(range(0xD0, 0xD9)) | {0x01}  # markers without a length


def _read_jpeg(data: bytes) -> Header:
    size: tuple[int, int] | None = None
    exif = b""
    position = 2
    for _ in range(_MAX_BLOCKS):
        found = _JPEG_MARKER.search(data, position)
        if found is None or found[1][0] == _JPEG_END:
            raise truncated()
        marker, position = found[1][0], found.end()
        if marker in _JPEG_BARE:
            continue
        (length,) = unpack_from(">H", data, position)
        end = position + length
        if marker in _JPEG_SIZES and size is None:
            height, width = unpack_from(">HH", data, position + 3)
            size = width, height
        elif marker == _JPEG_APP1 and not exif and data.startswith(b"Exif\0\0", position + 2):
            exif = data[position + 8 : end]
        elif marker == _JPEG_SCAN:
            if size is None:
                break
            # Inside compressed data 0xFF is always escaped, so this is the real end and not
            # that of an EXIF thumbnail. Cameras append data after it: look for it anywhere.
            is_complete = data.find(b"\xff\xd9", end) >= 0
            return Header("image/jpeg", *size, exif=exif, is_complete=is_complete)
        position = end
    raise _broken("JPEG")


def _read_gif(data: bytes) -> Header:
    width, height, flags = unpack_from("<HHB", data, 6)
    num_frames = 0
    position = 13 + _gif_palette_bytes(flags)
    for _ in range(_MAX_BLOCKS):
        # Many writers leave out the final ';': the end of the file after a whole frame will do.
        if position >= len(data) or data[position] == 0x3B:
            is_complete = num_frames > 0 and position <= len(data)
            return Header("image/gif", width, height, num_frames, is_complete=is_complete)
        block = data[position]
        if block == 0x21:  # extension: a label, then sub-blocks
            position = _skip_gif_sub_blocks(data, position + 2)
        elif block == 0x2C:  # frame: place and size, a palette, one byte of code size, sub-blocks
            left, top, frame_width, frame_height, flags = unpack_from("<4HB", data, position + 1)
            if num_frames == 0:  # the first frame may be larger than the screen it is put on
                width, height = max(width, left + frame_width), max(height, top + frame_height)
            num_frames += 1
            position = _skip_gif_sub_blocks(data, position + 11 + _gif_palette_bytes(flags))
        else:
            position += 1
    raise _broken("GIF")


def _gif_palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_gif_sub_blocks(data: bytes, position: int) -> int:
    """The place after the empty sub-block that ends the run; past the end if there is none."""
    while position < len(data):
        size = data[position]
        position += 1 + size
        if size == 0:
            return position
    return len(data) + 1


def _read_webp(data: bytes) -> Header:
    (riff_bytes,) = unpack_from("<I", data, 4)
    size: tuple[int, int] | None = None
    exif, num_frames = b"", 0
    position = 12
    for _ in range(_MAX_BLOCKS):
        if position + 8 > len(data):
            break
        kind, length = unpack_from("<4sI", data, position)
        body = position + 8
        position = body + length + (length & 1)
        if kind == b"ANMF":
            num_frames += 1
        elif kind == b"EXIF":
            exif = data[body : body + length]
        elif size is None:
            size = _webp_size(kind, data, body)
    if size is None:
        raise _broken("WebP")
    is_complete = 8 + riff_bytes <= len(data)
    return Header("image/webp", *size, max(1, num_frames), exif, is_complete)


def _webp_size(kind: bytes, data: bytes, body: int) -> tuple[int, int] | None:
    """The size in one chunk: the canvas if the file has one, else the only frame's."""
    if kind == b"VP8X":
        low_w, high_w, low_h, high_h = unpack_from("<HBHB", data, body + 4)
        return 1 + low_w + (high_w << 16), 1 + low_h + (high_h << 16)
    if kind == b"VP8L":
        signature, bits = unpack_from("<BI", data, body)
        return (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)) if signature == 0x2F else None
    if kind == b"VP8 ":
        start_code, width, height = unpack_from("<3sHH", data, body + 3)
        return (width & 0x3FFF, height & 0x3FFF) if start_code == b"\x9d\x01\x2a" else None
    return None


_BMP_CORE_HEADER = 12
_BMP_INFO_HEADERS = (40, 52, 56, 64, 108, 124)
_BMP_UNCOMPRESSED = (0, 3, 6)


def _read_bmp(data: bytes) -> Header:
    pixels_at, header_bytes = unpack_from("<II", data, 10)
    compression = 0
    if header_bytes == _BMP_CORE_HEADER:
        width, height, _, bits_per_pixel = unpack_from("<4H", data, 18)
    elif header_bytes in _BMP_INFO_HEADERS:
        width, height, _, bits_per_pixel, compression = unpack_from("<iiHHI", data, 18)
    else:
        raise _broken("BMP")
    width, height = max(0, width), abs(height)  # a negative height means rows from the top
    row_bytes = (width * bits_per_pixel + 31) // 32 * 4
    is_complete = compression not in _BMP_UNCOMPRESSED or pixels_at + row_bytes * height <= len(
        data
    )
    return Header("image/bmp", width, height, is_complete=is_complete)
