"""`epd launch`: run one worker in the foreground."""

from __future__ import annotations

import asyncio
import shlex
from typing import Annotated

import typer

from epd.checkpoints import resolve
from epd.cli.leave import leave
from epd.cli.options import ParentPid, takes_fields_of
from epd.config import WorkerConfig, build
from epd.config.load import OPTIONS
from epd.errors import ConfigError
from epd.observability.logs import configure_logs
from epd.open_files import raise_open_files_limit


@takes_fields_of(WorkerConfig)
def launch(
    *,
    parent_pid: ParentPid = None,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SGLANG_FLAGS]", help="Any flags of SGLang's server."),
    ] = None,
    **fields: str | list[str] | None,
) -> None:
    """Run one worker of one stage, under a lease of the coordinator."""
    given = {name: value for name, value in fields.items() if value is not None}
    if flags:
        given["sglang_flags"] = f"{given.get('sglang_flags', '')} {shlex.join(flags)}"
    config = build(WorkerConfig, given, source=OPTIONS)
    configure_logs(config.log_level)
    raise_open_files_limit()
    if config.engine == "sglang":
        from epd.engines.sglang.worker import run_sglang_worker

        asyncio.run(run_sglang_worker(config, parent_pid=parent_pid))
        return
    if config.sglang_flags:
        raise ConfigError("SGLang's flags need --engine sglang")
    if config.engine == "sim":
        from epd.engines.sim import run_sim_worker

        asyncio.run(run_sim_worker(config, parent_pid=parent_pid))
        return
    if config.profile:
        raise ConfigError("--profile needs --engine sim")
    # Before the engine is imported, which takes seconds: a wrong path is told at once.
    config = config.model_copy(update={"model": str(resolve(config.model))})

    from epd.engines.run import run_worker

    asyncio.run(run_worker(config, parent_pid=parent_pid))
    leave()
