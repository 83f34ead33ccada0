"""`epd up`: a coordinator and its pools on this machine, supervised as one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epd.auth import load_token
from epd.checkpoints import resolve
from epd.config import CoordinatorConfig, DeploymentConfig, load_deployment
from epd.engines.shell import bind
from epd.pools.local import (
    ConsoleLog,
    FileLog,
    Readiness,
    Supervisor,
    deployment_children,
    watch_until_ready,
)
from epd.sdk import AdminClient


def up(
    config: Annotated[Path, typer.Argument(help="YAML file of the deployment.")],
    *,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write a log file for each process here instead."),
    ] = None,
) -> None:
    """Run the coordinator and the pools of one file; Ctrl-C stops all."""
    deployment = load_deployment(config)
    # SGLang takes names of the Hugging Face Hub too; what it cannot load, it says itself.
    if any(pool.engine == "torch" and pool.replicas for _, pool in deployment.pools.items()):
        resolve(deployment.model)
    if deployment.join is None:
        _check_address(deployment.coordinator)
    asyncio.run(_run(deployment, config, log_dir))


def _check_address(settings: CoordinatorConfig) -> None:
    """Another coordinator at our address would answer in place of ours, so it is told at once."""
    bind(settings.host, settings.port, advice="set coordinator.port, or stop what uses it").close()


async def _run(deployment: DeploymentConfig, config_file: Path, log_dir: Path | None) -> None:
    console = Console(stderr=True)
    log = FileLog(log_dir) if log_dir else ConsoleLog(console)
    settings = deployment.coordinator
    token = load_token(settings.token_file, create=deployment.join is None)
    coordinator, workers = deployment_children(deployment, config_file, log)
    drain_s = max((pool.worker.drain_s for _, pool in deployment.pools.items()), default=0.0)

    def show(readiness: Readiness) -> None:
        console.print(f"ready: {readiness}", highlight=False)

    async def serve() -> None:
        async with AdminClient(deployment.url, token) as client:
            await watch_until_ready(client, deployment.pools, show)
        console.print(f"serving at {deployment.url}/v1; Ctrl-C stops all", highlight=False)
        await asyncio.Event().wait()

    async with Supervisor(coordinator, workers, drain_s=drain_s + 5) as supervisor:
        await supervisor.until_stopped(serve())
