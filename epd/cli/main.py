"""The `epd` command. Importing it needs neither torch nor an engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from epd import __version__
from epd.cli.coordinator import coordinator
from epd.cli.demo import demo
from epd.cli.doctor import doctor
from epd.cli.errors import one_line_errors
from epd.cli.launch import launch
from epd.cli.status import status
from epd.cli.up import up


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="epd",
        help="Serve vision-language models in three stages: encode, prefill, decode.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_version_option)
    for command in (demo, up, coordinator, launch, status, doctor):
        app.command()(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"epd {__version__}")
        raise typer.Exit


def _version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point of the console script."""
    with one_line_errors():
        sys.exit(build_app()(standalone_mode=False))
