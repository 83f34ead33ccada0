"""A deployment that lives as long as a block of code: 1E1P1D on free ports, in its own folder.

The folder holds its configuration, its logs and its own cluster token; the user's is never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from epd.auth import load_token
from epd.config import DeploymentConfig, load_deployment
from epd.errors import DeadlineError
from epd.pools.local.commands import deployment_children, free_port
from epd.pools.local.logs import FileLog
from epd.pools.local.readiness import Readiness, watch_until_ready
from epd.pools.local.supervisor import Supervisor
from epd.sdk import AdminClient

_START_S = 180.0
_DRAIN_S = 10.0
_MAX_CRASHES = 2
_TOKEN_FILE = "cluster-token"
_TUNING: Mapping[str, str | int | float] = {
    "threads": 1,
    "kv_bytes": 64 * 2**20,
    "embedding_bytes": 64 * 2**20,
    "drain_s": 5.0,
}


@dataclass(frozen=True, slots=True)
class TemporaryDeployment:
    """A running deployment, every worker ready."""

    url: str
    admin: AdminClient
    supervisor: Supervisor
    token_file: Path


@contextlib.asynccontextmanager
async def temporary_deployment(
    model: Path,
    folder: Path,
    on_progress: Callable[[Readiness], None] = lambda _: None,
    *,
    tuning: Mapping[str, str | int | float] = _TUNING,
) -> AsyncGenerator[TemporaryDeployment]:
    """Serve the checkpoint `model` from `folder` until the block ends.

    Args:
        model: a checkpoint's folder.
        folder: where the configuration, the token and the logs go.
        on_progress: told how many workers are ready, whenever that changes.
        tuning: fields of every worker's configuration.

    Raises:
        EPDError: a process did not start, or not in time; the message says where its log is.
    """
    config_file = _write_config(folder, model, tuning)
    deployment = load_deployment(config_file)
    settings = deployment.coordinator
    token = load_token(settings.token_file, create=True)
    coordinator, workers = deployment_children(
        deployment, config_file, FileLog(folder / "logs"), max_crashes=_MAX_CRASHES
    )
    async with (
        Supervisor(coordinator, workers, drain_s=_DRAIN_S) as supervisor,
        AdminClient(settings.url, token) as admin,
    ):
        await supervisor.guard(_until_ready(admin, deployment, on_progress, folder / "logs"))
        yield TemporaryDeployment(settings.url, admin, supervisor, folder / _TOKEN_FILE)


def _write_config(folder: Path, model: Path, tuning: Mapping[str, str | int | float]) -> Path:
    document = {
        "model": str(model),
        "coordinator": {"port": free_port(), "token_file": str(folder / _TOKEN_FILE)},
        "pools": {stage: {"worker": dict(tuning)} for stage in ("encode", "prefill", "decode")},
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


async def _until_ready(
    admin: AdminClient,
    deployment: DeploymentConfig,
    on_progress: Callable[[Readiness], None],
    logs: Path,
) -> None:
    try:
        async with asyncio.timeout(_START_S):
            await watch_until_ready(admin, deployment.pools, on_progress)
    except TimeoutError as exc:
        raise DeadlineError(f"not ready after {_START_S:.0f} s; see the logs in {logs}") from exc
