import io
import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from epd.errors import MediaError
from epd.media import inspect_image

from .images import animated, encode, exif, jpeg, noise, png, png_header

MAX_PIXELS = 1_000_000


def facts(data: bytes) -> tuple[int, int, str]:
    found = inspect_image(data, max_pixels=MAX_PIXELS)
    return found.width, found.height, found.mime


def palette_with_transparency() -> bytes:
    image = noise(17, 9).quantize(16)
    return encode(image, "PNG", transparency=3)


ACCEPTED = {
    "png": (png(40, 30), "image/png"),
    "png-palette-transparency": (palette_with_transparency(), "image/png"),
    "png-grey-alpha": (encode(Image.new("LA", (8, 5)), "PNG"), "image/png"),
    "png-16-bit": (encode(Image.new("I;16", (8, 5)), "PNG"), "image/png"),
    "png-exif-rotated": (encode(noise(8, 5), "PNG", exif=exif(6)), "image/png"),
    "apng": (animated("PNG"), "image/png"),
    "jpeg": (jpeg(), "image/jpeg"),
    "jpeg-progressive": (jpeg(progressive=True), "image/jpeg"),
    "jpeg-grey": (encode(Image.new("L", (11, 7)), "JPEG"), "image/jpeg"),
    "jpeg-cmyk": (encode(Image.new("CMYK", (33, 21)), "JPEG"), "image/jpeg"),
    "jpeg-trailing-bytes": (jpeg() + b"\0" * 100, "image/jpeg"),
    "gif": (encode(noise(10, 12), "GIF"), "image/gif"),
    "gif-animated": (animated("GIF"), "image/gif"),
    "gif-without-trailer": (animated("GIF")[:-1], "image/gif"),
    "webp-lossy": (encode(noise(50, 31), "WEBP"), "image/webp"),
    "webp-lossless": (encode(noise(51, 30), "WEBP", lossless=True), "image/webp"),
    "webp-alpha": (encode(noise(51, 30).convert("RGBA"), "WEBP"), "image/webp"),
    "webp-animated": (animated("WEBP"), "image/webp"),
    "webp-exif-rotated": (encode(noise(50, 31), "WEBP", exif=exif(8)), "image/webp"),
    "bmp": (encode(noise(13, 7), "BMP"), "image/bmp"),
    "bmp-one-bit": (encode(Image.new("1", (13, 7)), "BMP"), "image/bmp"),
    "one-pixel": (png(1, 1), "image/png"),
    "one-pixel-gif": (encode(noise(1, 1), "GIF"), "image/gif"),
    "thin": (png(1, 5000), "image/png"),
    "thin-jpeg": (jpeg(5000, 1), "image/jpeg"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_size_is_the_one_that_pillow_shows(name: str) -> None:
    data, mime = ACCEPTED[name]
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert facts(data) == (*shown.size, mime)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(format: str, orientation: int) -> None:
    data = encode(noise(40, 24), format, exif=exif(orientation))
    assert facts(data)[:2] == ((24, 40) if orientation >= 5 else (40, 24))


def test_big_endian_exif_is_read() -> None:
    block = b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0)
    assert facts(jpeg(40, 24, exif=b"Exif\0\0" + block))[:2] == (24, 40)


@pytest.mark.parametrize("cut", [0, 3, 7, 9, 15, 19])
def test_damaged_exif_counts_as_upright(cut: int) -> None:
    block = (b"II*\0" + struct.pack("<IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0))[:cut]
    assert facts(jpeg(40, 24, exif=b"Exif\0\0" + block))[:2] == (40, 24)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_the_frames_of_an_animation_are_counted(format: str) -> None:
    assert inspect_image(animated(format, 4), max_pixels=MAX_PIXELS).num_frames == 4


TRUNCATABLE = [name for name in ACCEPTED if not name.startswith(("bmp-one", "gif-without"))]


@pytest.mark.parametrize("name", TRUNCATABLE)
@pytest.mark.parametrize("kept_ratio", [0.3, 0.5, 0.9, 0.97])
def test_a_file_cut_off_is_refused_as_truncated(name: str, kept_ratio: float) -> None:
    data = ACCEPTED[name][0]
    if name == "jpeg-trailing-bytes":
        data = data[:-100]
    with pytest.raises(MediaError, match="truncated"):
        inspect_image(data[: int(len(data) * kept_ratio)], max_pixels=MAX_PIXELS)


def test_a_jpeg_cut_after_its_thumbnail_is_refused_as_truncated() -> None:
    thumbnail = jpeg(16, 12)
    whole = jpeg(64, 48, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0" + thumbnail)
    assert facts(whole)[:2] == (64, 48)
    with pytest.raises(MediaError, match="truncated"):
        facts(whole[: len(whole) - 200])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"II*\0" + b"\0" * 50,
        b"BM" + b"x" * 100,
        b"RIFF\x04\0\0\0WEBP",
        b"RIFF\x04\0\0\0WAVE",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xda\0\0",
    ],
)
def test_a_file_that_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError):
        facts(data)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(MediaError, match="no pixels"):
        facts(png_header(*size))


@pytest.mark.parametrize(
    "data",
    [
        png_header(30_000, 30_000),
        png_header(2**31 - 1, 2**31 - 1),
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
        + b"!\xf9\x04\x08\0\0\0\0" + b"," + struct.pack("<4HB", 0, 0, 65535, 65535, 0) + b"\x02\0;",
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" + b"\xff\x3f\0",
    ],
    ids=["png", "png-largest", "gif", "webp"],
)  # fmt: skip
def test_a_few_bytes_that_claim_a_huge_image_cost_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match="pixels"):
            inspect_image(data, max_pixels=100_000_000)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_the_pixel_limit_includes_its_own_value() -> None:
    data = png(10, 10)
    assert inspect_image(data, max_pixels=100).width == 10
    with pytest.raises(MediaError, match="99 allowed"):
        inspect_image(data, max_pixels=99)


def test_a_file_of_nothing_but_tiny_blocks_ends_soon() -> None:
    flood = b"\xff\xd8\xff\xe0\0\x02" + b"\xff\xe0\0\x02" * 300_000
    with pytest.raises(MediaError, match="damaged"):
        facts(flood)


MAGIC = st.sampled_from(
    [b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"GIF89a", b"GIF87a", b"BM"]
    + [b"RIFF\x10\0\0\0WEBP" + kind for kind in (b"VP8 ", b"VP8L", b"VP8X", b"EXIF")]
    + [b"\xff\xd8\xff\xe1\0\x20Exif\0\0II*\0", b"\xff\xd8\xff\xc0\0\x11\x08"]
)


@given(MAGIC, st.binary(max_size=300))
@example(b"GIF89a", b"\0" * 7 + b"!")
def test_random_bytes_give_facts_or_a_media_error(magic: bytes, tail: bytes) -> None:
    try:
        found = inspect_image(magic + tail, max_pixels=MAX_PIXELS)
    except MediaError as exc:
        assert exc.status == 400 and exc.message
    else:
        assert 0 < found.width * found.height <= MAX_PIXELS


@given(st.sampled_from(sorted(ACCEPTED)), st.data())
def test_a_damaged_byte_gives_facts_or_a_media_error(name: str, data: st.DataObject) -> None:
    damaged = bytearray(ACCEPTED[name][0])
    position = data.draw(st.integers(0, min(len(damaged), 400) - 1))
    damaged[position] = data.draw(st.integers(0, 255))
    try:
        found = inspect_image(bytes(damaged), max_pixels=MAX_PIXELS)
    except MediaError:
        return
    assert 0 < found.width * found.height <= MAX_PIXELS
