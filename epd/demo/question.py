"""What the demo asks: pictures drawn from a seed, or the user's own."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from epd.checkpoints.pictures import draw_question
from epd.errors import ConfigError

_DEFAULT_QUESTION = "What is in this picture?"
_PNG = "image/png"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file's bytes and type."""

    name: str
    mime: str
    data: bytes

    @property
    def url(self) -> str:
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about pictures; `expected` is None where only the user could know."""

    pictures: tuple[Picture, ...]
    text: str
    expected: str | None

    def chat_request(self, model: str, *, max_tokens: int, stream: bool) -> dict[str, Any]:
        """The body of `POST /v1/chat/completions`; greedy, so that each run gives the same."""
        images = [{"type": "image_url", "image_url": {"url": p.url}} for p in self.pictures]
        content = [*images, {"type": "text", "text": self.text}]
        return {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }


def make_question(image: Path | None, text: str | None, seed: int) -> Question:
    """The user's picture and question, or what is missing of them drawn from `seed`.

    Raises:
        ConfigError: the image cannot be read.
    """
    if image is not None:
        return Question((_read(image),), text or _DEFAULT_QUESTION, None)
    drawn = draw_question(seed)
    pictures = [
        Picture(f"picture-{number}.png", _PNG, _png(picture))
        for number, picture in enumerate(drawn.images, start=1)
    ]
    if text is not None:
        return Question(tuple(pictures[:1]), text, None)
    return Question(tuple(pictures), drawn.prompt, drawn.answer)


def _read(path: Path) -> Picture:
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            mime = image.get_format_mimetype()
    except OSError as exc:
        is_foreign = isinstance(exc, UnidentifiedImageError)
        reason = "it is no image" if is_foreign else exc.strerror or str(exc)
        raise ConfigError(f"--image {path}: {reason}") from exc
    return Picture(f"picture-1{path.suffix}", mime or _PNG, data)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
