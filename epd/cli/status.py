"""`epd status`: the workers of a coordinator, their state and load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epd.addresses import parse_url
from epd.auth import ClusterToken, load_token
from epd.errors import ConfigError
from epd.sdk import AdminClient, WorkerStatus

_MAX_WIDTH = 1000
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow"}


def status(
    *,
    coordinator: Annotated[
        str, typer.Option(metavar="URL", help="The coordinator.")
    ] = "http://127.0.0.1:8000",
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File of the cluster token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the workers: stage, state and load."""
    try:
        url = parse_url(coordinator)
    except ValueError as exc:
        raise ConfigError(f"--coordinator: {exc}") from None
    workers = asyncio.run(_fetch(url, load_token(token_file)))
    if as_json:
        print(json.dumps([worker.model_dump(mode="json") for worker in workers], indent=2))
    elif not workers:
        print("no workers have registered yet")
    else:
        # Each row on one line, which a narrow terminal wraps: cut numbers would be of no use.
        Console(width=_MAX_WIDTH).print(_table(workers))


async def _fetch(url: str, token: ClusterToken) -> list[WorkerStatus]:
    async with AdminClient(url, token) as client:
        return await client.workers()


def _table(workers: list[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stage", "worker", "state", "model", "engine", "url"):
        table.add_column(heading)
    for heading in ("running", "waiting", "tokens", "seen s ago"):
        table.add_column(heading, justify="right")
    for worker in workers:
        load = worker.load
        table.add_row(
            worker.stage,
            worker.worker_id,
            _state(worker),
            worker.model_id,
            worker.engine,
            worker.url,
            str(load.num_running_reqs),
            str(load.num_waiting_reqs),
            f"{load.num_used_tokens}/{load.max_total_num_tokens}",
            f"{worker.age_s:.1f}",
        )
    return table


def _state(worker: WorkerStatus) -> str:
    if worker.is_left_alone:
        return f"[red]{worker.state}, failing[/]"
    return f"[{_STATE_STYLES.get(worker.state, 'red')}]{worker.state}[/]"
