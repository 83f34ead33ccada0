"""The files in configs/ are whole: they load, and every worker of theirs can be composed."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.config import DeploymentConfig, WorkerConfig, build, load_deployment
from epd.engines.sglang.flags import Ports, compose
from epd.errors import ConfigError
from epd.pools.local import FileLog, deployment_children

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GPU_CONFIGS = [path for path in CONFIGS if path.name != "local-cpu.yaml"]


def workers(deployment: DeploymentConfig) -> list[WorkerConfig]:
    return [
        deployment.worker(stage, replica)
        for stage, pool in deployment.pools.items()
        for replica in range(pool.replicas)
    ]


def argv(worker: WorkerConfig) -> list[str]:
    ports = Ports(http=20_001, bootstrap=20_002)
    urls = ["http://10.0.0.1:8000/internal/encoders/x/0"]
    return compose(worker, model=worker.model, served_name="vl", ports=ports, encoder_urls=urls)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_file_loads_and_says_how_to_run_it(path: Path) -> None:
    deployment = load_deployment(path)
    assert workers(deployment)
    assert f"epd up configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: path.stem)
def test_every_server_of_a_file_has_gpus_and_flags(path: Path) -> None:
    for worker in workers(load_deployment(path)):
        assert worker.engine == "sglang"
        assert len(worker.gpus) == worker.num_gpus
        assert "--port" in argv(worker)


def test_the_files_are_of_the_sizes_they_say() -> None:
    def sizes(*names: str) -> str:
        counts = {"encode": 0, "prefill": 0, "decode": 0}
        for name in names:
            for worker in workers(load_deployment(CONFIGS[0].with_name(f"{name}.yaml"))):
                counts[worker.stage] += 1
        return "{encode}E{prefill}P{decode}D".format(**counts)

    assert sizes("one-node-4gpu") == "1E1P2D"
    assert sizes("two-nodes-rdma-head", "two-nodes-rdma-second") == "2E2P4D"
    assert sizes("qwen2.5-vl-72b-head", "qwen2.5-vl-72b-second") == "4E1P2D"


def test_workers_of_two_machines_have_different_names() -> None:
    names = [
        worker.worker_id
        for name in ("head", "second")
        for worker in workers(load_deployment(CONFIGS[0].with_name(f"two-nodes-rdma-{name}.yaml")))
    ]
    assert len(set(names)) == len(names) == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"join": "http://h:1"}, "join needs node"),
        (
            {
                "pools": {
                    "encode": {"engine": "sglang", "gpus": [[0]]},
                    "prefill": {"engine": "sglang", "gpus": [[0]]},
                }
            },
            "encode-0 and prefill-0 are both given GPU 0",
        ),
        (
            {
                "pools": {
                    "encode": {"engine": "sglang", "gpus": [[0, 1]], "worker": {"tp": 2}},
                    "decode": {"engine": "sglang", "worker": {"gpus": [1]}},
                }
            },
            "encode-0 and decode-0 are both given GPU 1",
        ),
        (
            {"pools": {"decode": {"engine": "sglang", "replicas": 2, "worker": {"gpus": "3"}}}},
            "decode-0 and decode-1 are both given GPU 3",
        ),
        (
            {
                "pools": {
                    "encode": {"devices": ["cuda:1", "cuda"], "replicas": 2},
                    "decode": {"engine": "sglang", "worker": {"gpus": [0]}},
                }
            },
            "encode-1 runs on cuda, but GPU 0 is decode-0's",
        ),
        (
            {"pools": {"decode": {"gpus": [[0]], "worker": {"gpus": [0]}}}},
            "gpus and worker.gpus both name GPUs",
        ),
        ({"pools": {"decode": {"replicas": 2, "gpus": [[0]]}}}, "1 groups for 2 replicas"),
        (
            {
                "pools": {
                    "prefill": {"engine": "sglang", "worker": {"tp": 2}},
                    "decode": {"engine": "sglang", "worker": {"tp": 4}},
                }
            },
            "tp differs between prefill",
        ),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(DeploymentConfig, values, source="file")


def test_workers_may_share_a_device_but_not_gpus_and_idle_pools_have_none() -> None:
    deployment = build(
        DeploymentConfig,
        {
            "pools": {
                "encode": {"devices": ["cuda:0"]},
                "prefill": {"devices": ["cuda:0"], "replicas": 2},
                "decode": {"engine": "sglang", "worker": {"gpus": [1]}},
            }
        },
        source="file",
    )
    assert [worker.device for worker in workers(deployment)][:3] == ["cuda:0"] * 3
    assert workers(deployment)[-1].gpus == (1,)
    idle = {"replicas": 0, "worker": {"gpus": [0]}}
    pools = {"encode": idle, "prefill": idle, "decode": {"worker": {"gpus": [0]}}}
    assert build(DeploymentConfig, {"pools": pools}, source="file")


def test_a_machine_that_joins_runs_no_coordinator(tmp_path: Path) -> None:
    path = CONFIGS[0].with_name("two-nodes-rdma-second.yaml")
    coordinator, children = deployment_children(load_deployment(path), path, FileLog(tmp_path))
    assert coordinator is None
    assert [child.spec.name for child in children][:2] == ["second-encode-0", "second-prefill-0"]
    for child in children:
        assert "--coordinator=http://10.0.0.1:8000" in child.spec.argv
        assert f"--worker-id={child.spec.name}" in child.spec.argv


def test_a_store_master_runs_where_it_is_asked_for(tmp_path: Path) -> None:
    deployment = build(DeploymentConfig, {"mooncake_master": 50051}, source="file")
    _, children = deployment_children(deployment, tmp_path / "f.yaml", FileLog(tmp_path))
    command, flag = children[0].spec.argv[-2:]
    assert (Path(command).name, flag) == ("mooncake_master", "--rpc_port=50051")
    _, others = deployment_children(DeploymentConfig(), tmp_path / "f.yaml", FileLog(tmp_path))
    assert "mooncake_master" not in str([child.spec.argv for child in others])
