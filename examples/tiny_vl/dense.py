"""Teaches the vision tower what is where: a label for every image token.

Reading a colour or a digit from one answer word per picture is a weak signal for a tower that
starts from noise. While training, a linear head on the image tokens names what lies under each
of them. The head is thrown away afterwards; the checkpoint does not hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from epd.checkpoints.scenes import COLOURS, DIRECTIONS, SHAPES, Item, Scene

NUM_CHARACTERS = 4
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_COLOUR_NAMES = tuple(COLOURS)
IGNORE = -100

GROUPS: tuple[tuple[str, int], ...] = (
    ("name", 2 + len(SHAPES)),
    ("colour", 1 + len(COLOURS)),
    ("is_centre", 2),
    ("num_alike", 6),
    ("relation", 1 + len(DIRECTIONS)),
    *((f"character_{i}", 1 + len(_ALPHABET)) for i in range(NUM_CHARACTERS)),
)
"""What is asked of every image token, and among how many classes."""


def label_cells(scene: Scene, rows: int, columns: int) -> NDArray[np.int16]:
    """Labels [rows * columns, len(GROUPS)] of the picture cut into cells.

    A cell belongs to an item when a quarter of it is covered or the item's centre lies in it.
    Cells that are merely touched are left out of the loss.
    """
    labels = np.full((rows, columns, len(GROUPS)), IGNORE, dtype=np.int16)
    labels[:, :, 0] = 0
    width, height = scene.image.size
    owner = np.zeros((rows, columns), dtype=np.float64)
    for index, item in enumerate(scene.items):
        left, top, right, bottom = item.box
        x = np.clip(np.array([left, right]) / width * columns, 0, columns)
        y = np.clip(np.array([top, bottom]) / height * rows, 0, rows)
        covered = np.outer(_overlap(y, rows), _overlap(x, columns))
        centre = min(rows - 1, int(y.mean())), min(columns - 1, int(x.mean()))
        labels[(covered > 0.02) & (covered < 0.25) & (owner == 0), 0] = IGNORE
        covered[centre] += 1.0
        mine = (covered >= 0.25) & (covered > owner)
        owner[mine] = covered[mine]
        labels[mine] = _label(scene, index, item)
        if mine[centre]:
            labels[(*centre, 2)] = 1
    return labels.reshape(rows * columns, -1)


def _overlap(span: NDArray[np.float64], number: int) -> NDArray[np.float64]:
    edges = np.arange(number)
    return np.clip(np.minimum(span[1], edges + 1) - np.maximum(span[0], edges), 0, 1)


def _label(scene: Scene, index: int, item: Item) -> list[int]:
    """The labels of a cell of this item; what cannot be asked about it is left out of the loss."""
    colour = 1 + _COLOUR_NAMES.index(item.colour)
    if item.text:
        num_slots = 2 if item.text.isdigit() else NUM_CHARACTERS
        characters = [1 + _ALPHABET.index(c) for c in item.text] + [0] * NUM_CHARACTERS
        slots = characters[:num_slots] + [IGNORE] * (NUM_CHARACTERS - num_slots)
        return [1 + len(SHAPES), colour, 0, IGNORE, IGNORE, *slots]
    relation = 1 + (DIRECTIONS.index(scene.relation) ^ index) if scene.relation else IGNORE
    alike = sum(i.name == item.name and i.colour == item.colour for i in scene.items)
    name = 1 + SHAPES.index(item.name)
    return [name, colour, 0, min(5, alike), relation, *[IGNORE] * NUM_CHARACTERS]


class DenseHead(nn.Module):
    """One linear layer from an image token to all groups of classes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, sum(size for _, size in GROUPS))

    def loss(self, image_tokens: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, mean over cells and then over groups.

        Args:
            image_tokens: [num_images, cells, hidden].
            labels: [num_images, cells, len(GROUPS)], int64, `IGNORE` where there is none.
        """
        logits = self.out(image_tokens.float()).flatten(0, 1)
        labels = labels.flatten(0, 1)
        losses: list[Tensor] = []
        for index, part in enumerate(logits.split([size for _, size in GROUPS], dim=-1)):
            target = labels[:, index]
            total = F.cross_entropy(part, target, ignore_index=IGNORE, reduction="sum")
            losses.append(total / (target != IGNORE).sum().clamp(min=1))
        return torch.stack(losses).mean()


def accuracies(head: DenseHead, image_tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of labelled cells that the head names right, by group; for the training log."""
    logits = head.out(image_tokens.float()).flatten(0, 1)
    labels = labels.flatten(0, 1)
    shares: dict[str, float] = {}
    sizes: Sequence[int] = [size for _, size in GROUPS]
    for index, part in enumerate(logits.split(list(sizes), dim=-1)):
        known = labels[:, index] != IGNORE
        right = (part.argmax(-1) == labels[:, index])[known].float()
        shares[GROUPS[index][0]] = right.mean().item() if len(right) else float("nan")
    return shares
