"""The command lines that `epd up` starts its processes with."""

from __future__ import annotations

from epd.cli.launch import launch
from epd.config import DeploymentConfig, WorkerConfig, build
from epd.config.load import OPTIONS
from epd.pools.local.commands import _options
from epd.types import Stage


def test_a_workers_command_line_gives_its_configuration_back() -> None:
    deployment = build(
        DeploymentConfig,
        {
            "labels": {"zone": "a", "rack": "r=1"},
            "pools": {"prefill": {"engine": "sglang", "worker": {"tp": 2, "gpus": [0, 1]}}},
        },
        source="a test",
    )
    worker = deployment.worker(Stage.PREFILL, 0)
    options: dict[str, object] = {}
    labels: list[str] = []
    for option in _options(worker):
        flag, _, value = option.removeprefix("--").partition("=")
        name = flag.replace("-", "_")
        assert name in launch.__annotations__
        if name == "label":
            labels.append(value)
        elif name != "parent_pid":
            options[name] = value
    assert build(WorkerConfig, {**options, "label": labels}, source=OPTIONS) == worker
