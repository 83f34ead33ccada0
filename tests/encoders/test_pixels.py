import io
from typing import Any

import pytest
from PIL import Image

from encoders.pixels import canonical_image
from epd.errors import MediaError

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_an_animation_shows_its_first_frame():
    frames = [Image.new("RGB", (8, 6), color) for color in (RED, GREEN)]
    image = canonical_image(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (image.mode, image.size) == ("RGB", (8, 6))
    assert image.getpixel((0, 0)) == RED


def test_a_transparent_palette_image_lies_on_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 1), 1)
    canonical = canonical_image(file_of(image, "PNG", transparency=0))
    assert canonical.getpixel((0, 0)) == WHITE
    assert canonical.getpixel((1, 1)) == GREEN


def test_half_transparency_is_blended_with_white():
    canonical = canonical_image(file_of(Image.new("RGBA", (2, 2), (255, 0, 0, 128)), "PNG"))
    assert canonical.getpixel((0, 0)) == (255, 127, 127)


def test_a_cmyk_jpeg_becomes_rgb():
    image = canonical_image(file_of(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert image.mode == "RGB"
    red, green, blue = image.getpixel((8, 8))
    assert red > 240 and green < 15 and blue < 15


def test_a_rotated_jpeg_is_turned_upright():
    sideways = Image.new("RGB", (32, 16), RED)
    sideways.paste(GREEN, (0, 0, 16, 16))  # left half; upright (turned right) it is the top
    exif = Image.Exif()
    exif[0x0112] = 6
    image = canonical_image(file_of(sideways, "JPEG", exif=exif.tobytes(), quality=95))
    assert image.size == (16, 32)
    top = image.getpixel((8, 4))
    assert top[1] > 200 and top[0] < 60


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [("L", 7, 7), ("1", 1, 255), ("I;16", 40000, 155), ("I;16", 65535, 255)],
)
def test_grey_images_of_any_depth_keep_their_brightness(mode: str, color: int, expected: int):
    image = canonical_image(file_of(Image.new(mode, (4, 4), color), "PNG"))
    assert image.getpixel((0, 0)) == (expected,) * 3


@pytest.mark.parametrize(
    ("size", "expected"), [((1, 1), (1, 1)), ((1, 5000), (25, 5000)), ((5000, 1), (5000, 25))]
)
def test_tiny_and_sliver_images_are_answered(size: tuple[int, int], expected: tuple[int, int]):
    image = canonical_image(file_of(Image.new("RGB", size, RED), "PNG"))
    assert image.size == expected
    assert image.getpixel((0, 0)) == RED


def test_a_truncated_jpeg_is_a_media_error():
    data = file_of(Image.effect_noise((64, 64), 50), "JPEG")
    with pytest.raises(MediaError, match="cannot be decoded"):
        canonical_image(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"GIF89a\1"])
def test_a_file_that_is_no_image_is_a_media_error(data: bytes):
    with pytest.raises(MediaError, match="not an image"):
        canonical_image(data)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of cut EXIF data
def test_an_image_cut_at_any_byte_never_raises_another_error():
    for kind in ("PNG", "GIF", "BMP", "WEBP", "TIFF"):
        data = file_of(Image.linear_gradient("L").resize((9, 9)).convert("RGB"), kind)
        for length in range(0, len(data), max(1, len(data) // 60)):
            try:
                canonical_image(data[:length])
            except MediaError:
                continue
