"""`epd coordinator`: run the coordinator in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from epd.cli.options import ParentPid, takes_fields_of
from epd.config import CoordinatorConfig, load_coordinator
from epd.observability.logs import configure_logs
from epd.open_files import raise_open_files_limit


@takes_fields_of(CoordinatorConfig)
def coordinator(
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file; its `coordinator` section is read.")
    ] = None,
    parent_pid: ParentPid = None,
    **fields: str | None,
) -> None:
    """Run the coordinator: the OpenAI API, and the schedule of the three pools."""
    from epd.api.server import run_coordinator

    settings = load_coordinator(config, **fields)
    configure_logs(settings.log_level)
    raise_open_files_limit()
    asyncio.run(run_coordinator(settings, parent_pid=parent_pid))
