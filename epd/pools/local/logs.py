"""Where the output of supervised processes goes: the terminal, or a file for each."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from epd.types import Stage

_STYLES = {Stage.ENCODE: "magenta", Stage.PREFILL: "cyan", Stage.DECODE: "green", None: "yellow"}


class Log(Protocol):
    """Takes the output of all children, line by line."""

    def write(self, name: str, stage: Stage | None, line: str) -> None:
        """One line, without its end, of the child `name`; stage None is the coordinator."""
        ...


class ConsoleLog:
    """The terminal; each line begins with the child's name, in the colour of its stage."""

    def __init__(self, console: Console, *, name_width: int = 11) -> None:
        self._console = console
        self._name_width = name_width

    def write(self, name: str, stage: Stage | None, line: str) -> None:
        prefix = Text(f"{name:<{self._name_width}} │ ", style=_STYLES[stage])
        self._console.print(prefix + Text.from_ansi(line), soft_wrap=True, highlight=False)


class FileLog:
    """One file for each child, `NAME.log` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, stage: Stage | None, line: str) -> None:
        # Lifecycle lines only, a few a second at most: opening each time keeps no state to close.
        with (self._folder / f"{name}.log").open("a") as file:
            file.write(f"{line}\n")
