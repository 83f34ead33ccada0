"""A simulated worker as a process of its own, and its profile in a file."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml

from epd.config import WorkerConfig, load_deployment
from epd.engines.sim import Profile, load_profile, run_sim_worker
from epd.errors import ConfigError
from epd.pools.local import FileLog, deployment_children
from epd.types import Stage
from tests.e2e.cluster import Cluster

BUNDLED = Path(__file__).parents[3] / "configs" / "profiles" / "assumed-7b.yaml"


def test_the_bundled_profile_spells_out_the_defaults() -> None:
    assert yaml.safe_load(BUNDLED.read_text()) == Profile().model_dump()
    assert "ASSUMPTIONS, NOT MEASUREMENTS" in BUNDLED.read_text()


def test_a_profile_names_the_key_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("decode: {base_msec: 3}")
    with pytest.raises(ConfigError, match=r"unknown key decode.base_msec; did you mean base_ms\?"):
        load_profile(path)
    path.write_text("answer: {min_tokens: 9, max_tokens: 3}")
    with pytest.raises(ConfigError, match=r"answer: min_tokens \(9\) is above max_tokens \(3\)"):
        load_profile(path)
    path.write_text("time_scale: 0.5")
    assert load_profile(path) == Profile(time_scale=0.5)


async def test_an_option_that_the_profile_decides_is_refused() -> None:
    config = WorkerConfig(stage=Stage.DECODE, model="m", engine="sim", kv_bytes=2**20)
    with pytest.raises(ConfigError, match="kv_bytes is not read by the sim engine: set prefill"):
        await run_sim_worker(config)


def test_a_deployment_file_may_simulate_its_pools(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    pool = {"engine": "sim", "replicas": 2, "worker": {"profile": str(BUNDLED)}}
    path.write_text(json.dumps({"model": "any-name", "pools": {"decode": pool}}))
    deployment = load_deployment(path)
    _, workers = deployment_children(deployment, path, FileLog(tmp_path))
    commands = [worker.spec.argv for worker in workers if worker.spec.stage is Stage.DECODE]
    assert len(commands) == 2
    assert all({"--engine=sim", f"--profile={BUNDLED}"} <= set(argv) for argv in commands)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_launched_workers_die_by_a_fault_and_leave_by_a_signal(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "any-name", worker_options=("--engine", "sim"))
    try:
        cluster.start()
        found = cluster.workers()
        assert {worker["engine"] for worker in found.values()} == {"sim"}
        killed = cluster.processes["decode"]
        order = urllib.request.Request(
            found["decode"]["url"] + "/sim/faults", b'{"kind": "die"}', cluster.headers
        )
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(order, timeout=20)
        assert killed.popen.wait(20) == -9
        assert cluster.processes["prefill"].stop() == 0
        cluster.wait_until(lambda: "prefill" not in ready(cluster), "prefill has left the pool")
        log = cluster.processes["prefill"].log.read_text()
        assert re.search("ready at .*, simulating any-name", log)
    finally:
        cluster.stop()


def ready(cluster: Cluster) -> set[str]:
    return {name for name, worker in cluster.workers().items() if worker["state"] == "ready"}
