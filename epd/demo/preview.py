"""A picture in the terminal: by the terminal's own image protocol, or in coloured half blocks.

kitty: https://sw.kovidgoyal.net/kitty/graphics-protocol/; iTerm2: https://iterm2.com/documentation-images.html
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

_MAX_COLUMNS = 40
_MAX_ROWS = 20
_CHUNK_CHARS = 4096
"""Longest payload of one kitty escape."""


def show_picture(console: Console, data: bytes, environ: Mapping[str, str]) -> None:
    """Print the picture if the terminal can show one; nothing when output is piped."""
    if not console.is_terminal or console.is_dumb_terminal:
        return
    with Image.open(io.BytesIO(data)) as image:
        image.seek(0)
        picture = image.convert("RGB")
    protocol = image_protocol(environ)
    if protocol is not None:
        columns, _ = _cells(picture, console.width)
        escape = _kitty if protocol == "kitty" else _iterm2
        console.file.write(escape(_png(picture), columns) + "\n")
        console.file.flush()
    elif console.color_system is not None:
        console.print(half_blocks(picture, console.width))


def image_protocol(environ: Mapping[str, str]) -> str | None:
    """`kitty` or `iterm2` if the terminal says it knows one; None otherwise."""
    # A multiplexer swallows image escapes or draws them in the wrong pane.
    if "TMUX" in environ or environ.get("TERM", "").startswith(("screen", "tmux")):
        return None
    program = environ.get("TERM_PROGRAM", "")
    is_kitty = "KITTY_WINDOW_ID" in environ or environ.get("TERM") == "xterm-kitty"
    if is_kitty or program == "ghostty":
        return "kitty"
    if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return None


def half_blocks(picture: Image.Image, width: int) -> Text:
    """Two pixels a character: the upper as foreground of ▀, the lower as its background."""
    columns, rows = _cells(picture, width)
    small = picture.resize((columns, rows * 2), Image.Resampling.BOX)
    text = Text()
    for row in range(rows):
        for column in range(columns):
            upper = _color(small, column, 2 * row)
            lower = _color(small, column, 2 * row + 1)
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    text.rstrip()
    return text


def _cells(picture: Image.Image, width: int) -> tuple[int, int]:
    """Columns and rows that show the picture undistorted; a cell is twice as high as wide."""
    scale = min(min(_MAX_COLUMNS, width) / picture.width, 2 * _MAX_ROWS / picture.height)
    return max(1, round(picture.width * scale)), max(1, round(picture.height * scale / 2))


def _color(picture: Image.Image, x: int, y: int) -> Color:
    pixel = picture.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return Color.from_rgb(*pixel)


def _kitty(png: bytes, columns: int) -> str:
    payload = base64.b64encode(png).decode()
    chunks = [payload[i : i + _CHUNK_CHARS] for i in range(0, len(payload), _CHUNK_CHARS)]
    escapes: list[str] = []
    for index, chunk in enumerate(chunks):
        more = int(index < len(chunks) - 1)
        head = f"a=T,f=100,c={columns},m={more}" if index == 0 else f"m={more}"
        escapes.append(f"\x1b_G{head};{chunk}\x1b\\")
    return "".join(escapes)


def _iterm2(png: bytes, columns: int) -> str:
    payload = base64.b64encode(png).decode()
    return f"\x1b]1337;File=inline=1;width={columns};preserveAspectRatio=1:{payload}\a"


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
