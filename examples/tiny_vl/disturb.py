"""What happens to pictures on their way: JPEG, other light, grain, blur."""

from __future__ import annotations

import io
from random import Random

from PIL import Image, ImageEnhance, ImageFilter


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    """The picture after one round through a JPEG file; `quality` from 1 to 95."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")


def brightened(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


def disturb(rng: Random, image: Image.Image) -> Image.Image:
    """Training only: each disturbance with some chance, so about one picture in four stays."""
    if rng.random() < 0.4:
        image = brightened(image, rng.uniform(0.85, 1.15))
    if rng.random() < 0.1:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.15:
        grain = Image.frombytes("L", image.size, rng.randbytes(image.width * image.height))
        image = Image.blend(image, Image.merge("RGB", (grain,) * 3), rng.uniform(0.02, 0.08))
    if rng.random() < 0.4:
        image = as_jpeg(image, rng.randint(25, 92))
    return image
