"""One canonical RGB image from any image file, so that every model family sees the same pixels.

The encode worker calls it, off its event loop: decoding takes milliseconds to seconds. Limits on
bytes and pixels are the caller's; they must be checked before the file is decoded here.
"""

from __future__ import annotations

import io
import struct

from PIL import Image, ImageOps

from encoders.base import canonical_size
from epd.errors import MediaError

# What Pillow raises on files that are broken, truncated or of an unknown kind. Its decoders are
# many, and some let a parsing error of the standard library escape.
_BROKEN_FILE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    struct.error,
    Image.DecompressionBombError,
)


def canonical_image(data: bytes) -> Image.Image:
    """Decode the first frame of `data`: upright, RGB, no transparency, no narrower than 1:200.

    Raises:
        MediaError: not an image, truncated or broken.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return canonical(image)
    except _BROKEN_FILE as exc:
        raise MediaError(f"the image cannot be decoded: {_reason(exc)}") from exc


def canonical(image: Image.Image) -> Image.Image:
    """The same for an image that is already decoded."""
    image = _as_rgb(ImageOps.exif_transpose(image))
    size = canonical_size(*image.size)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        return _as_8_bit(image).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _as_8_bit(image: Image.Image) -> Image.Image:
    """16- and 32-bit grey to 8-bit. Pillow's own conversion clips at 255 instead of scaling."""
    wide = image.convert("F")
    _, brightest = wide.getextrema()
    assert isinstance(brightest, float)  # one band: one pair of numbers
    # 32-bit integers and floats have no agreed white: take their brightest pixel.
    white = 65535.0 if image.mode.startswith("I;16") else max(1.0, brightest)
    return wide.point(lambda value: value * (255.0 / white) + 0.0).convert("L")


def _reason(exc: BaseException) -> str:
    if isinstance(exc, Image.UnidentifiedImageError):
        return "not an image file, or of an unknown format"
    return str(exc) or type(exc).__name__
