"""Lays conversations out as rows of tokens, several questions on one picture in one row.

In a *tree* the questions share the picture as their prefix but do not see one another: each is
masked from the others and takes its positions as if it stood alone. So one encoded picture
teaches several single-turn questions. In a *chain* the turns follow one another, as in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

NO_TARGET = -100
_PADDING = 99
"""Branch number of padding, which so sees only itself; 0 is the prefix."""


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: str
    answer: str


@dataclass(slots=True)
class Row:
    """One sequence being laid out. `position` is that of the next token in the open branch."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    branch: int = 0
    position: int = 0

    def add(self, ids: Sequence[int], is_answer: bool = False) -> None:
        """Appends text; the tokens of an answer become targets of the token before them."""
        for token in ids:
            if is_answer:
                self.targets[-1] = token
            self.ids.append(token)
            self.targets.append(NO_TARGET)
            self.branches.append(self.branch)
            self.positions.append((self.position, self.position, self.position))
            self.position += 1

    def add_picture(self, image_token: int, rows: int, columns: int) -> None:
        """Appends image tokens with the positions of Qwen2.5-VL: equal time, row, column."""
        start = self.position
        for i in range(rows * columns):
            self.ids.append(image_token)
            self.targets.append(NO_TARGET)
            self.branches.append(self.branch)
            self.positions.append((start, start + i // columns, start + i % columns))
        self.position = start + max(rows, columns)


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch: ids, targets and branches [batch, length], positions [3, batch, length]; int64."""

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    branches: NDArray[np.int64]
    positions: NDArray[np.int64]


class Packer:
    """Writes rows in the chat template, piece by piece: start, role, text, end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.image_token: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._pad: int = tokenizer.pad_token_id

    def tree(self, system: str, grids: Sequence[tuple[int, int]], turns: Sequence[Turn]) -> Row:
        """A row in which all `turns` ask about the same pictures, each on its own."""
        row = Row()
        self._open(row, system)
        self._pictures(row, grids)
        start = row.position
        for branch, turn in enumerate(turns, start=1):
            row.branch, row.position = branch, start
            self._answer(row, turn.prompt, turn.answer)
        return row

    def chain(
        self, system: str, grids: Sequence[tuple[int, int]], turns: Sequence[Turn], shown_at: int
    ) -> Row:
        """A row of turns that see one another; the pictures come with turn `shown_at`."""
        row = Row()
        self._open(row, system)
        for index, turn in enumerate(turns):
            if index:
                row.add(self._encode("\n<|im_start|>user\n"))
            if index == shown_at:
                self._pictures(row, grids)
            self._answer(row, turn.prompt, turn.answer)
        return row

    def text_first(self, system: str, grids: Sequence[tuple[int, int]], turn: Turn) -> Row:
        """A row of one question whose pictures come after its words."""
        row = Row()
        self._open(row, system)
        row.add(self._encode(turn.prompt))
        self._pictures(row, grids)
        self._answer(row, "", turn.answer)
        return row

    def stack(self, rows: Sequence[Row]) -> Rows:
        """Pads to one length, a multiple of 8."""
        length = -(-max(len(row.ids) for row in rows) // 8) * 8
        shape = (len(rows), length)
        ids = np.full(shape, self._pad, dtype=np.int64)
        targets = np.full(shape, NO_TARGET, dtype=np.int64)
        branches = np.full(shape, _PADDING, dtype=np.int64)
        positions = np.zeros((3, *shape), dtype=np.int64)
        for i, row in enumerate(rows):
            number = len(row.ids)
            ids[i, :number] = row.ids
            targets[i, :number] = row.targets
            branches[i, :number] = row.branches
            positions[:, i, :number] = np.array(row.positions).T
        return Rows(ids, targets, branches, positions)

    def _open(self, row: Row, system: str) -> None:
        row.add(self._encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"))

    def _pictures(self, row: Row, grids: Sequence[tuple[int, int]]) -> None:
        for rows, columns in grids:
            row.add(self._encode("<|vision_start|>"))
            row.add_picture(self.image_token, rows, columns)
            row.add(self._encode("<|vision_end|>"))

    def _answer(self, row: Row, prompt: str, answer: str) -> None:
        row.add(self._encode(f"{prompt}<|im_end|>\n<|im_start|>assistant\n"))
        row.add(self._encode(f"{answer}<|im_end|>"), is_answer=True)

    def _encode(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._tokenizer(text).input_ids
            if len(self._known) < 50_000:
                self._known[text] = ids
        return ids
