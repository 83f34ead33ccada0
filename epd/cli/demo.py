"""`epd demo`: see the three stages at work on one picture."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    *,
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Checkpoint to serve (default: bundled).")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Ask about this picture.")
    ] = None,
    question: Annotated[str | None, typer.Option(metavar="TEXT", help="Ask this.")] = None,
    seed: Annotated[
        int, typer.Option(metavar="INTEGER", help="Which picture and question to draw.")
    ] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on serving, and print how to ask again.")
    ] = False,
) -> None:
    """Start one worker of each stage, ask about a picture, and show where the time went."""
    from epd.demo import DemoOptions, run_demo

    options = DemoOptions(model=model, image=image, question=question, seed=seed, keep=keep)
    asyncio.run(run_demo(options, Console(), Console(stderr=True)))
