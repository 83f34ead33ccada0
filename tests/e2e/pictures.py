"""Pictures of the end-to-end tests, and the requests that show them."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image, ImageDraw


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A few coloured boxes, different for each seed."""
    rng = random.Random(f"{width}x{height}-{seed}")
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        left, top = rng.randrange(width), rng.randrange(height)
        box = (left, top, left + width // 3, top + height // 3)
        draw.rectangle(box, fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: bytes | str) -> dict[str, Any]:
    """A user message; bytes are image files, strings text."""
    content = [text_part(p) if isinstance(p, str) else image_part(p) for p in parts]
    return {"role": "user", "content": content}
