"""Pictures as users send them: unusual ones are answered, broken ones refused by name."""

from __future__ import annotations

import openai
import pytest
from PIL import Image

from tests.e2e.cluster import Cluster
from tests.e2e.pictures import data_url, encoded, picture, user

pytestmark = pytest.mark.cluster


def gif() -> bytes:
    frames = [picture(60, 40, seed) for seed in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


def transparent_palette_png() -> bytes:
    image = picture(60, 60).convert("P")
    image.info["transparency"] = 0
    return encoded(image, "PNG", transparency=0)


def rotated_jpeg() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(140, 56), "JPEG", exif=exif)


ODD = {
    "animated GIF": gif,
    "palette PNG with transparency": transparent_palette_png,
    "CMYK JPEG": lambda: encoded(picture(80, 60).convert("CMYK"), "JPEG"),
    "EXIF-rotated JPEG": rotated_jpeg,
    "1x1": lambda: encoded(picture(3, 3).resize((1, 1))),
    "1x5000": lambda: encoded(picture(3, 5000).resize((1, 5000))),
    "5000x1": lambda: encoded(picture(5000, 3).resize((5000, 1))),
    "grey with alpha": lambda: encoded(picture(50, 50).convert("LA")),
    "16-bit grey": lambda: encoded(picture(50, 50).convert("I;16")),
    "WebP": lambda: encoded(picture(50, 70), "WEBP"),
}


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, *parts: bytes | str, **more: object) -> object:
    return client.chat.completions.create(  # type: ignore[call-overload]
        model="random-vl", messages=[user(*parts)], **{"max_tokens": 3, **more}
    )


@pytest.mark.parametrize("kind", ODD)
def test_unusual_images_are_answered(client: openai.OpenAI, kind: str) -> None:
    answer = ask(client, ODD[kind](), "What is it?")
    assert answer.usage.completion_tokens >= 1  # type: ignore[attr-defined]


def test_an_exif_rotated_image_counts_tokens_as_it_is_shown(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    reply = client.chat.completions.with_raw_response.create(
        model="random-vl",
        messages=[user(rotated_jpeg(), "What?")],  # type: ignore[list-item]
        max_tokens=2,
    )
    timeline = cluster.timeline(reply.headers["x-epd-request-id"])
    encode = next(span for span in timeline["spans"] if span["name"] == "encode")
    assert encode["num_tokens"] == timeline["num_image_tokens"]


WHOLE = encoded(picture(120, 90), "JPEG")
BROKEN = {
    "no image": data_url(b"just text"),
    "truncated JPEG": data_url(WHOLE[: len(WHOLE) // 2], "image/jpeg"),
    "broken base64": "data:image/png;base64,!!!!",
    "file URL": "file:///etc/passwd",
    "loopback URL": "http://127.0.0.1:9/x.png",
    "metadata service": "http://169.254.169.254/latest/meta-data",
    "unreachable host": "http://nowhere.invalid/x.png",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_refused_naming_the_field(client: openai.OpenAI, kind: str) -> None:
    good = user(encoded(picture(56, 56)), "and")
    bad = {"type": "image_url", "image_url": {"url": BROKEN[kind]}}
    good["content"].append(bad)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="random-vl", messages=[good])
    assert caught.value.param == "messages[0].content[2].image_url.url"
    assert caught.value.code == "invalid_image"


def test_pixels_broken_beyond_the_header_are_refused_naming_the_field(
    client: openai.OpenAI,
) -> None:
    damaged = bytearray(encoded(Image.effect_noise((200, 200), 80)))
    middle = len(damaged) // 2
    damaged[middle : middle + 4000] = bytes(range(250)) * 16
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "first", bytes(damaged))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_a_prompt_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "word " * 200_000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
