"""`epd doctor`: what this machine lacks, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from epd.doctor import Check, Verdict, diagnose

_STYLES = {
    Verdict.OK: "green",
    Verdict.ABSENT: "dim",
    Verdict.WARNING: "yellow",
    Verdict.PROBLEM: "bold red",
}
_VERDICT_WIDTH = max(len(verdict) for verdict in Verdict)
_NAME_WIDTH = 17


def doctor(
    *,
    host: Annotated[
        str, typer.Option(metavar="TEXT", help="Where a coordinator would listen.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="INTEGER", help="Where a coordinator would listen.")
    ] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File of the cluster token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine; exit code 1 if something stops even the demo on a CPU."""
    checks: list[Check] = []
    console = Console()
    for check in diagnose(host=host, port=port, token_file=token_file):
        checks.append(check)
        if not as_json:
            _show(console, check)
    has_problem = any(check.verdict is Verdict.PROBLEM for check in checks)
    if as_json:
        document = {"checks": [dataclasses.asdict(c) for c in checks], "ok": not has_problem}
        print(json.dumps(document, indent=2))
    if has_problem:
        raise typer.Exit(1)


def _show(console: Console, check: Check) -> None:
    line = Text(f"{check.verdict:<{_VERDICT_WIDTH}}  ", style=_STYLES[check.verdict])
    line.append(f"{check.name:<{_NAME_WIDTH}}  {check.detail}", style="default")
    console.print(line, soft_wrap=True, highlight=False)
    if check.what_to_do:
        indent = " " * (_VERDICT_WIDTH + _NAME_WIDTH + 4)
        console.print(Text(f"{indent}→ {check.what_to_do}"), soft_wrap=True, highlight=False)
