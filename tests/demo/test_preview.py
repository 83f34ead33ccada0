"""The picture in the terminal."""

import base64
import io
import re

import pytest
from PIL import Image
from rich.console import Console

from epd.demo.preview import half_blocks, image_protocol, show_picture


def png(width: int = 8, height: int = 8, colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def shown(environ: dict[str, str], data: bytes, **options: object) -> str:
    settings = {"force_terminal": True, "color_system": "truecolor", "width": 80, **options}
    file = io.StringIO()
    console = Console(file=file, legacy_windows=False, **settings)  # pyright: ignore
    show_picture(console, data, environ)
    return file.getvalue()


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
        ({"TMUX": "/tmp/x", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "screen-256color", "LC_TERMINAL": "iTerm2"}, None),
    ],
)
def test_the_terminals_protocol_is_known_by_what_it_says(
    environ: dict[str, str], protocol: str | None
) -> None:
    assert image_protocol(environ) == protocol


def test_nothing_is_shown_when_output_is_piped() -> None:
    assert shown({"KITTY_WINDOW_ID": "1"}, png(), force_terminal=False) == ""
    assert shown({}, png(), force_terminal=False) == ""


def test_nothing_is_shown_on_a_terminal_without_colours() -> None:
    assert shown({}, png(), color_system=None) == ""


def test_kitty_gets_the_picture_in_chunks_it_accepts() -> None:
    noise = Image.effect_noise((128, 128), 90)
    buffer = io.BytesIO()
    noise.save(buffer, format="PNG")
    output = shown({"TERM": "xterm-kitty"}, buffer.getvalue())
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", output)
    assert len(chunks) > 1
    assert chunks[0][0].startswith("a=T,f=100,")
    assert all(len(payload) <= 4096 for _, payload in chunks)
    assert [head[-3:] for head, _ in chunks] == ["m=1"] * (len(chunks) - 1) + ["m=0"]
    sent = base64.b64decode("".join(payload for _, payload in chunks))
    assert Image.open(io.BytesIO(sent)).size == (128, 128)


def test_iterm2_gets_the_picture_inline() -> None:
    output = shown({"TERM_PROGRAM": "iTerm.app"}, png())
    match = re.fullmatch(r"\x1b\]1337;File=inline=1;[^:]*:([^\a]*)\a\n", output)
    assert match is not None
    assert Image.open(io.BytesIO(base64.b64decode(match[1]))).size == (8, 8)


def test_other_colour_terminals_get_half_blocks() -> None:
    output = shown({}, png())
    assert "▀" in output
    assert "38;2;255;0;0" in output and "48;2;255;0;0" in output


@pytest.mark.parametrize(("size", "cells"), [((100, 100), (40, 20)), ((400, 100), (40, 5))])
def test_the_picture_keeps_its_proportions(size: tuple[int, int], cells: tuple[int, int]) -> None:
    lines = half_blocks(Image.new("RGB", size), 80).plain.splitlines()
    assert (len(lines[0]), len(lines)) == cells


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_odd_pictures_fit_too(size: tuple[int, int]) -> None:
    lines = half_blocks(Image.new("RGB", size), 30).plain.splitlines()
    assert 1 <= len(lines) <= 20
    assert 1 <= len(lines[0]) <= 30


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "L", "I;16"])
def test_pictures_of_any_mode_are_shown(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (4, 4)).save(buffer, format="TIFF")
    assert "▀" in shown({}, buffer.getvalue())
