"""Draws training batches. Batch number i of seed s is the same on every machine.

All pictures of a batch have the same number of cells, so that the vision tower runs without
padding; small sizes come with many pictures, large ones with few, at about equal cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedTokenizerBase

from epd.checkpoints.pictures import Ask, Kind, ask_about, draw_scenes
from epd.checkpoints.scenes import CELL_PX, MAX_IMAGE_PX, MIN_IMAGE_PX, Scene, cells, draw_size
from examples.tiny_vl import talk
from examples.tiny_vl.dense import label_cells
from examples.tiny_vl.disturb import disturb
from examples.tiny_vl.pack import Packer, Row, Rows, Turn

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

_TEXT_KINDS: tuple[Kind, ...] = ("number", "number", "word")
_SHAPE_KINDS: tuple[Kind, ...] = ("colour", "count", "count", "relation", "relation")
_TEXT_RATIO = 0.25
"""Share of batches whose pictures show text. They have rows of their own, since there is less to
ask about them and rows of one length waste no padding."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of one size: pixels [n, rows, columns, 4, 588] uint8, labels [n, cells, groups]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` is None when only the vision tower is to learn. One `Pictures` per place."""

    pictures: tuple[Pictures, ...]
    rows: Rows | None


def cut(image: Image.Image, rows: int, columns: int) -> NDArray[np.uint8]:
    """Pixels as the image processor orders them, [rows, columns, 4, 3 * 14 * 14], raw."""
    size = (columns * CELL_PX, rows * CELL_PX)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image).reshape(rows, 2, 14, columns, 2, 14, 3)
    return pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows, columns, 4, -1)


class BatchMaker:
    """Makes batch after batch from one seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, budget: int) -> None:
        self._packer = Packer(tokenizer)
        self._seed = seed
        self._budget = budget

    def make(self, index: int, is_vision_only: bool) -> Batch:
        rng = Random(f"train {self._seed} {index}")
        grid = _draw_grid(rng)
        num_cells = grid[0] * grid[1]
        if is_vision_only:
            number = max(8, min(160, self._budget // 4 // num_cells))
            kinds = (*_TEXT_KINDS, *_SHAPE_KINDS)
            scenes = [_draw_one(rng, kinds, grid) for _ in range(number)]
            return Batch((_stack(rng, scenes, grid),), None)
        form = rng.choices(("tree", "chain", "first", "two", "text"), weights=(47, 10, 5, 35, 3))[0]
        if form == "text":
            made = [self._text_row(rng) for _ in range(self._budget // 150)]
            return Batch((), self._packer.stack(made))
        if form == "two":
            return self._two(rng, grid)
        kinds = _TEXT_KINDS if rng.random() < _TEXT_RATIO else _SHAPE_KINDS
        is_short = form == "first" or kinds == _TEXT_KINDS
        number = max(6, self._budget // ((70 if is_short else 125) + 3 * num_cells))
        scenes = [_draw_one(rng, kinds, grid) for _ in range(number)]
        lay = {"tree": self._tree, "chain": self._chain, "first": self._text_first}[form]
        made = [lay(rng, scene, grid) for scene in scenes]
        return Batch((_stack(rng, scenes, grid),), self._packer.stack(made))

    def _two(self, rng: Random, grid: tuple[int, int]) -> Batch:
        other = grid if rng.random() < 0.4 else _draw_grid(rng)
        num_cells = grid[0] * grid[1] + other[0] * other[1]
        number = max(6, self._budget // (95 + 3 * num_cells))
        pairs: list[tuple[Scene, ...]] = []
        made: list[Row] = []
        for _ in range(number):
            pair = _draw_pair(rng, grid, other)
            pairs.append(pair)
            asks = ask_about(rng, pair)
            turns = [_turn(ask) for ask in rng.sample(asks, min(4, len(asks)))]
            made.append(self._packer.tree(talk.draw_system(rng), (grid, other), turns))
        pictures = tuple(
            _stack(rng, [pair[i] for pair in pairs], g) for i, g in enumerate((grid, other))
        )
        return Batch(pictures, self._packer.stack(made))

    def _tree(self, rng: Random, scene: Scene, grid: tuple[int, int]) -> Row:
        return self._packer.tree(talk.draw_system(rng), (grid,), _turns(rng, scene, 5))

    def _chain(self, rng: Random, scene: Scene, grid: tuple[int, int]) -> Row:
        turns = _turns(rng, scene, 3)
        shown_at = 0
        if rng.random() < 0.3:
            shown_at = 1
            turns = [_chat(rng) if rng.random() < 0.7 else _blind(rng), *turns[:2]]
        return self._packer.chain(talk.draw_system(rng), (grid,), turns, shown_at)

    def _text_first(self, rng: Random, scene: Scene, grid: tuple[int, int]) -> Row:
        turn = _turns(rng, scene, 1)[0]
        return self._packer.text_first(talk.draw_system(rng), (grid,), turn)

    def _text_row(self, rng: Random) -> Row:
        turns = [_chat(rng) if rng.random() < 0.75 else _blind(rng) for _ in range(6)]
        return self._packer.tree(talk.draw_system(rng), (), turns)


def _draw_one(rng: Random, kinds: tuple[Kind, ...], grid: tuple[int, int]) -> Scene:
    return draw_scenes(rng, rng.choice(kinds), _size_in(rng, grid))[0]


def _draw_pair(rng: Random, grid: tuple[int, int], other: tuple[int, int]) -> tuple[Scene, ...]:
    """Two pictures; drawn again now and then, so that about half of all pairs are alike."""
    while True:
        pair = draw_scenes(rng, "compare", _size_in(rng, grid), _size_in(rng, other))
        one, two = (scene.items[0] for scene in pair)
        is_alike = one.text == two.text if one.text else one.name == two.name
        if is_alike or one.colour == two.colour or rng.random() < 0.6:
            return pair


def _turns(rng: Random, scene: Scene, number: int) -> list[Turn]:
    """Questions about one picture, hard kinds more often; now and then something to refuse."""
    asks = ask_about(rng, [scene])
    rng.shuffle(asks)
    if scene.items[0].text:
        noun, colour = scene.items[0].name, scene.items[0].colour
        prompt = rng.choice((f"What colour is the {noun}?", f"Tell me the colour of the {noun}."))
        asks.append(Ask("colour", prompt, f"the {noun} is {colour}"))
    elif rng.random() < 0.7:
        asks.sort(key=lambda ask: ask.kind not in ("relation", "count", "shape"))
    turns = [_turn(ask) for ask in asks[:number]]
    if rng.random() < 0.1:
        turns[rng.randrange(len(turns))] = _chat(rng)
    rng.shuffle(turns)
    return turns


def _turn(ask: Ask) -> Turn:
    return Turn(ask.prompt, ask.answer)


def _chat(rng: Random) -> Turn:
    chat = talk.draw_chat(rng)
    return Turn(chat.prompt, chat.answer)


def _blind(rng: Random) -> Turn:
    """A question about a picture that nobody has shown."""
    kind = rng.choice((*_TEXT_KINDS, *_SHAPE_KINDS))
    return Turn(
        rng.choice(ask_about(rng, draw_scenes(rng, kind, (84, 84)))).prompt, talk.NO_PICTURE
    )


def _draw_grid(rng: Random) -> tuple[int, int]:
    """Rows and columns of image tokens, of a size as it is drawn in general."""
    columns, rows = cells(draw_size(rng))
    return rows, columns


def _size_in(rng: Random, grid: tuple[int, int]) -> tuple[int, int]:
    """Width and height in pixels that the image processor scales to this grid."""
    rows, columns = grid
    for scale in (*(rng.uniform(0.5, 1.0) for _ in range(4)), rng.uniform(1.0, 2.67), 1.0, 1.0):
        width, height = (
            round(side * CELL_PX * scale) + rng.randint(-13, 13) for side in (columns, rows)
        )
        is_natural = min(width, height) >= MIN_IMAGE_PX and max(width, height) <= MAX_IMAGE_PX
        if is_natural and cells((width, height)) == (columns, rows):
            return width, height
    return columns * CELL_PX, rows * CELL_PX


def _stack(rng: Random, scenes: list[Scene], grid: tuple[int, int]) -> Pictures:
    pixels = [cut(disturb(rng, scene.image), *grid) for scene in scenes]
    labels = [label_cells(scene, *grid) for scene in scenes]
    return Pictures(np.stack(pixels), np.stack(labels))
