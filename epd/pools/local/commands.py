"""The command lines of a deployment's processes, from its configuration."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from epd.config import DeploymentConfig, WorkerConfig
from epd.pools.local.child import Child, ChildSpec
from epd.pools.local.logs import Log

_EPD = (sys.executable, "-m", "epd")
_ENV = {"PYTHONUNBUFFERED": "1"}


def deployment_children(
    deployment: DeploymentConfig,
    config_file: Path,
    log: Log,
    *,
    max_crashes: int | None = None,
) -> tuple[Child | None, list[Child]]:
    """The coordinator (None if it is on another machine) and the workers, not yet started.

    Args:
        deployment: the configuration.
        config_file: where `deployment` was read from; the coordinator reads its sections there.
        log: takes the output of all.
        max_crashes: give up when one process has crashed so often; never if None.
    """
    coordinator = ChildSpec(
        name="coordinator",
        argv=(
            *_EPD,
            "coordinator",
            f"--config={config_file}",
            f"--port={deployment.coordinator.port}",
            f"--parent-pid={os.getpid()}",
        ),
        env=_ENV,
    )
    workers = [
        ChildSpec(
            name=deployment.worker_id(stage, replica),
            stage=stage,
            argv=(*_EPD, "launch", *_options(deployment.worker(stage, replica))),
            env=_ENV,
        )
        for stage, pool in deployment.pools.items()
        for replica in range(pool.replicas)
    ]
    if deployment.mooncake_master is not None:
        workers.insert(0, _mooncake_master(deployment.mooncake_master))
    children = [Child(spec, log, max_crashes=max_crashes) for spec in workers]
    if deployment.join is not None:
        return None, children
    return Child(coordinator, log, max_crashes=max_crashes), children


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _mooncake_master(port: int) -> ChildSpec:
    # It knows nothing of parents, so the kernel ends it should we be killed.
    tie = (sys.executable, "-m", "epd.engines.sglang.parent", str(os.getpid()))
    master = str(Path(sys.executable).with_name("mooncake_master"))
    return ChildSpec(name="kv-master", argv=(*tie, master, f"--rpc_port={port}"))


def _options(worker: WorkerConfig) -> Iterator[str]:
    for name, value in worker.model_dump(mode="json", exclude_unset=True).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif isinstance(value, dict):
            for key, text in value.items():
                yield f"{flag}={key}={text}"
        elif value is not None and value is not False:
            yield f"{flag}={value}"
    yield f"--parent-pid={os.getpid()}"
