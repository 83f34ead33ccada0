"""Pictures the media tests share, made on the spot."""

import io
import struct
import zlib
from typing import Any

from PIL import Image


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    """An RGB picture that compresses badly, so that cutting its file cuts pixels."""
    return Image.effect_noise((width, height), 80).convert("RGB")


def png(width: int = 4, height: int = 3) -> bytes:
    return encode(noise(width, height), "PNG")


def jpeg(width: int = 64, height: int = 48, **options: Any) -> bytes:
    return encode(noise(width, height), "JPEG", **options)


def animated(format: str, num_frames: int = 3) -> bytes:
    frames = [Image.new("RGB", (30, 20), (80 * i, 0, 0)) for i in range(num_frames)]
    return encode(frames[0], format, save_all=True, append_images=frames[1:], duration=50)


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def png_header(width: int, height: int) -> bytes:
    """A whole PNG file of under 100 bytes that claims any size."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", ihdr)
        + png_chunk(b"IDAT", zlib.compress(b"\0"))
        + png_chunk(b"IEND", b"")
    )
