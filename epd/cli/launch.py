"""`epd launch`: run one worker in the foreground."""

from __future__ import annotations

import asyncio

from epd.checkpoints import resolve
from epd.cli.options import ParentPid, takes_fields_of
from epd.config import WorkerConfig, build
from epd.config.load import OPTIONS
from epd.observability.logs import configure_logs


@takes_fields_of(WorkerConfig)
def launch(*, parent_pid: ParentPid = None, **fields: str | None) -> None:
    """Run one worker of one stage, under a lease of the coordinator."""
    given = {name: value for name, value in fields.items() if value is not None}
    config = build(WorkerConfig, given, source=OPTIONS)
    configure_logs(config.log_level)
    # Before the engine is imported, which takes seconds: a wrong path is told at once.
    config = config.model_copy(update={"model": str(resolve(config.model))})

    from epd.engines.run import run_worker

    asyncio.run(run_worker(config, parent_pid=parent_pid))
