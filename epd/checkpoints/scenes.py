"""Draws the pictures that the tiny model was made for: coloured shapes, numbers and short words.

Owns what is in a picture (`Scene`) and its pixels. What one can ask about it is in `pictures`.
Needs Pillow only. Every pixel follows from the `random.Random` that is handed in: no global
state, no clock, and no Pillow call that draws random numbers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

Rgb: TypeAlias = tuple[int, int, int]
Box: TypeAlias = tuple[float, float, float, float]

COLOURS: dict[str, Rgb] = {
    "red": (218, 32, 32),
    "green": (34, 158, 62),
    "blue": (38, 84, 222),
    "yellow": (248, 220, 40),
    "orange": (250, 138, 10),
    "purple": (146, 48, 190),
    "black": (18, 18, 18),
    "white": (246, 246, 246),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
WORDS = (
    *("bag", "boat", "book", "bus", "cat", "cup", "dog", "exit", "fish", "go", "hat", "key"),
    *("lamp", "map", "milk", "moon", "open", "rain", "ship", "stop", "sun", "tree", "van", "zoo"),
)
DIRECTIONS = ("left of", "right of", "above", "below")

MIN_IMAGE_PX = 56
MAX_IMAGE_PX = 448
MIN_ITEM_PX = 17
CELL_PX = 28
"""Side of the square of pixels behind one image token (patch 14, merged 2 x 2)."""
MIN_PIXELS = 112 * 112
MAX_PIXELS = 168 * 168
"""The image processor scales a picture so that it has between so many and so many pixels, as
Qwen2.5-VL's `min_pixels` and `max_pixels` do: 16 to 36 image tokens, whatever its size."""

HELD_OUT_CELLS = frozenset({(7, 5), (5, 7)})
"""Image sizes (columns, rows of image tokens) that are never drawn unless asked for by size."""

_SUPERSAMPLE = 4
_MIN_CONTRAST = 115.0
"""Least distance in RGB between an item and the background; below it items melt away."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing in a picture; `text` is empty for a shape, and `box` is in pixels."""

    name: str
    colour: str
    box: Box
    text: str = ""

    @property
    def phrase(self) -> str:
        return f"{self.colour} {self.name}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A drawn picture and what is in it.

    `relation` says where the first item lies seen from the second; empty unless the scene was
    drawn to ask that.
    """

    image: Image.Image
    items: tuple[Item, ...]
    relation: str = ""


def cells(size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of image tokens of a picture of this width and height in pixels.

    The rule of Qwen2-VL's image processor (`smart_resize` in transformers).
    """
    width, height = size
    columns, rows = round(width / CELL_PX), round(height / CELL_PX)
    pixels = columns * rows * CELL_PX**2
    if pixels > MAX_PIXELS:
        shrink = math.sqrt(width * height / MAX_PIXELS)
        columns, rows = (max(1, math.floor(side / shrink / CELL_PX)) for side in size)
    elif pixels < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        columns, rows = (math.ceil(side * grow / CELL_PX) for side in size)
    return columns, rows


def draw_size(rng: Random) -> tuple[int, int]:
    """Width and height in pixels: small more often than large, up to 5:3, any natural number."""
    while True:
        longest = MIN_IMAGE_PX * (MAX_IMAGE_PX / MIN_IMAGE_PX) ** (rng.random() ** 1.6)
        aspect = 1.0 if rng.random() < 0.4 else rng.uniform(0.6, 1.0)
        sides = [max(MIN_IMAGE_PX, round(longest)), max(MIN_IMAGE_PX, round(longest * aspect))]
        if rng.random() < 0.5:
            sides.reverse()
        size = sides[0], sides[1]
        if cells(size) not in HELD_OUT_CELLS:
            return size


def max_items(size: tuple[int, int]) -> int:
    """How many shapes a picture of this size can hold and stay readable."""
    return min(7, size[0] * size[1] // 780)


def draw_shapes(rng: Random, size: tuple[int, int], kinds: Sequence[tuple[str, str]]) -> Scene:
    """A picture of one item for each (shape, colour) of `kinds`, apart from one another."""
    boxes = _place(rng, size, len(kinds))
    items = tuple(Item(name, colour, box) for (name, colour), box in zip(kinds, boxes, strict=True))
    return Scene(_paint(rng, size, items), items)


def draw_pair(
    rng: Random, size: tuple[int, int], kinds: Sequence[tuple[str, str]], direction: str
) -> Scene:
    """Two items, the first `direction` the second, clearly along that axis."""
    axis = 0 if direction in ("left of", "right of") else 1
    sides = [_side(rng, min(size), 0.42) for _ in kinds]
    room = float(size[axis]) - sum(sides)
    if room < 4:
        sides = [max(MIN_ITEM_PX, side * (size[axis] - 6) / sum(sides)) for side in sides]
        room = size[axis] - sum(sides)
    gap = rng.uniform(min(3.0, room), room)
    start = rng.uniform(0, room - gap)
    along = [start, start + sides[0] + gap]
    reach = 0.45 * (gap + (sides[0] + sides[1]) / 2)
    middle = [rng.uniform(side / 2, size[1 - axis] - side / 2) for side in sides]
    middle[1] = min(max(middle[1], middle[0] - reach), middle[0] + reach)
    across = [
        min(max(0.0, mid - side / 2), size[1 - axis] - side)
        for mid, side in zip(middle, sides, strict=True)
    ]
    boxes: list[Box] = []
    for low, cross, side in zip(along, across, sides, strict=True):
        x, y = (low, cross) if axis == 0 else (cross, low)
        boxes.append((x, y, x + side, y + side))
    first_is_low = direction in ("left of", "above")
    order = (0, 1) if first_is_low else (1, 0)
    items = tuple(Item(name, colour, boxes[order[i]]) for i, (name, colour) in enumerate(kinds))
    return Scene(_paint(rng, size, items), items, relation=direction)


def draw_text(rng: Random, size: tuple[int, int], name: str, text: str, colour: str) -> Scene:
    """A picture of `text` (a number or a word, as `name` says) in one line, anywhere that fits."""
    shown = text.upper() if rng.random() < 0.4 else text
    font_px = max(20.0, rng.uniform(0.3, 0.95) * size[1])
    left, top, right, bottom = _font(round(font_px)).getbbox(shown)
    shrink = min(1.0, (size[0] - 4) / (right - left), (size[1] - 4) / (bottom - top))
    font = _font(max(12, math.floor(font_px * shrink)))
    left, top, right, bottom = font.getbbox(shown)
    x = rng.uniform(1, max(1.0, size[0] - (right - left) - 1))
    y = rng.uniform(1, max(1.0, size[1] - (bottom - top) - 1))
    item = Item(name, colour, (x, y, x + right - left, y + bottom - top), text=text)
    image = _background(rng, size, (colour,))
    ImageDraw.Draw(image).text(
        (round(x) - left, round(y) - top), shown, fill=_tint(rng, colour), font=font
    )
    return Scene(image, (item,))


@lru_cache(maxsize=256)
def _font(size_px: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font; the basic layout engine, so that an installed Raqm changes nothing."""
    font = ImageFont.load_default(size=size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow was built without FreeType and cannot draw text")
    return font.font_variant(layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def _mask(name: str, side_px: int) -> Image.Image:
    """Coverage of a shape in a square, smooth at the edges."""
    full = side_px * _SUPERSAMPLE
    mask = Image.new("L", (full, full), 0)
    pen = ImageDraw.Draw(mask)
    if name == "circle":
        pen.ellipse((0, 0, full - 1, full - 1), fill=255)
    else:
        pen.polygon([(x * (full - 1), y * (full - 1)) for x, y in _outline(name)], fill=255)
    return mask.reduce(_SUPERSAMPLE)


def _outline(name: str) -> list[tuple[float, float]]:
    """Corners of a shape in the unit square."""
    if name == "square":
        return [(0.04, 0.04), (0.96, 0.04), (0.96, 0.96), (0.04, 0.96)]
    if name == "triangle":
        return [(0.5, 0), (1, 1), (0, 1)]
    if name == "diamond":
        return [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]
    if name == "cross":
        low, high = 0.33, 0.67
        upper = [(low, 0), (high, 0), (high, low), (1, low), (1, high), (high, high)]
        return [*upper, (high, 1), (low, 1), (low, high), (0, high), (0, low), (low, low)]
    if name == "star":
        return [
            (
                0.5 + (0.5 if i % 2 == 0 else 0.21) * math.sin(i * math.pi / 5),
                0.53 - (0.53 if i % 2 == 0 else 0.22) * math.cos(i * math.pi / 5),
            )
            for i in range(10)
        ]
    raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(SHAPES)}")


def _side(rng: Random, shortest_px: int, largest_ratio: float) -> float:
    return max(MIN_ITEM_PX, rng.uniform(0.2, largest_ratio) * shortest_px)


def _place(rng: Random, size: tuple[int, int], number: int) -> list[Box]:
    """Boxes that do not touch; items shrink when the first draw does not fit."""
    fill = math.sqrt(0.42 * size[0] * size[1] / number) / min(size)
    largest = min(0.62, max(0.24, fill))
    sides = [_side(rng, min(size), largest) for _ in range(number)]
    for _ in range(14):
        for _ in range(12):
            boxes = _scatter(rng, size, sides)
            if boxes:
                return boxes
        sides = [max(MIN_ITEM_PX, side * 0.88) for side in sides]
    columns = math.ceil(math.sqrt(number * size[0] / size[1]))
    rows = math.ceil(number / columns)
    width, height = size[0] / columns, size[1] / rows
    side = min(float(MIN_ITEM_PX), width, height)
    spots = [(i % columns * width, i // columns * height) for i in range(columns * rows)]
    return [(x, y, x + side, y + side) for x, y in rng.sample(spots, number)]


def _scatter(rng: Random, size: tuple[int, int], sides: Sequence[float]) -> list[Box]:
    gap = max(2.0, 0.03 * min(size))
    boxes: list[Box] = []
    for side in sides:
        x, y = rng.uniform(0, size[0] - side), rng.uniform(0, size[1] - side)
        for left, top, right, bottom in boxes:
            apart_x = x > right + gap or x + side < left - gap
            if not apart_x and not (y > bottom + gap or y + side < top - gap):
                return []
        boxes.append((x, y, x + side, y + side))
    return boxes


def _paint(rng: Random, size: tuple[int, int], items: Sequence[Item]) -> Image.Image:
    image = _background(rng, size, [item.colour for item in items])
    tints = {item.colour: _tint(rng, item.colour) for item in items}
    for item in items:
        left, top, right, _ = item.box
        mask = _mask(item.name, max(4, round(right - left)))
        image.paste(tints[item.colour], (round(left), round(top)), mask)
    return image


def _tint(rng: Random, colour: str) -> Rgb:
    """The colour as a painter would mix it today: up to 14 of 255 away in each channel."""
    red, green, blue = (min(255, max(0, c + rng.randint(-14, 14))) for c in COLOURS[colour])
    return red, green, blue


def _background(rng: Random, size: tuple[int, int], colours: Sequence[str]) -> Image.Image:
    """A grey or faintly coloured ground, plain or shaded, that every item stands out from."""
    while True:
        grey = rng.choice((rng.randint(0, 70), rng.randint(70, 185), rng.randint(185, 255)))
        ground = [min(255, max(0, grey + rng.randint(-22, 22))) for _ in range(3)]
        if all(math.dist(ground, COLOURS[colour]) >= _MIN_CONTRAST for colour in colours):
            break
    image = Image.new("RGB", size, (ground[0], ground[1], ground[2]))
    if rng.random() < 0.35:
        shade = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
        tone = rng.choice(((0, 0, 0), (255, 255, 255)))
        image.paste(tone, (0, 0), shade.point([round(i * 0.16) for i in range(256)]))
    if rng.random() < 0.2:
        grain = Image.frombytes("L", size, rng.randbytes(size[0] * size[1]))
        image = Image.blend(image, Image.merge("RGB", (grain, grain, grain)), 0.05)
    return image
