"""`epd up` with real processes: it serves, heals, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from epd.engines.torch.tiny import write_random_checkpoint
from epd.pools.local import free_port
from tests.cli.deployment import START_S, children_of, is_alive, running, until

ROOT = Path(__file__).parents[2]
NAMES = {"coordinator", "encode-0", "prefill-0", "decode-0"}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "random-vl"
    write_random_checkpoint(path, family="qwen2_5_vl", seed=0)
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    """The shipped configuration with a model, a port and a token of this test."""
    document = yaml.safe_load((ROOT / "configs" / "local-cpu.yaml").read_text())
    document["model"] = str(model)
    document["coordinator"] |= {"port": free_port(), "token_file": str(tmp_path / "token")}
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def status(config: Path) -> dict[str, str]:
    """Worker → state, as `epd status --json` tells it."""
    section = yaml.safe_load(config.read_text())["coordinator"]
    url = f"http://127.0.0.1:{section['port']}"
    options = ["--coordinator", url, "--token-file", section["token_file"], "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "epd", "status", *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return {worker["worker_id"]: worker["state"] for worker in json.loads(done.stdout)}


def test_ctrl_c_stops_all_in_order(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running("up", str(config), output=output) as up:
        until(lambda: "Ctrl-C stops all" in output.read_text(), START_S, "serving")
        assert status(config) == dict.fromkeys(NAMES - {"coordinator"}, "ready")
        children = children_of(up.pid)
        assert set(children) == NAMES
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
        assert [name for name, pid in children.items() if is_alive(pid)] == []
    text = output.read_text()
    assert "Traceback" not in text
    for name in NAMES:
        assert f"{name:<11} │ " in text


def test_no_orphan_outlives_a_supervisor_that_was_killed(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running("up", str(config), output=output) as up:
        until(lambda: "Ctrl-C stops all" in output.read_text(), START_S, "serving")
        children = children_of(up.pid)
        assert set(children) == NAMES
        up.kill()
        up.wait()
        until(
            lambda: not any(is_alive(pid) for pid in children.values()), 60, "all children are gone"
        )


def test_no_orphan_outlives_a_supervisor_killed_while_starting(
    config: Path, tmp_path: Path
) -> None:
    with running("up", str(config), output=tmp_path / "output") as up:
        until(lambda: set(children_of(up.pid)) == NAMES, START_S, "children are started")
        children = children_of(up.pid)
        up.kill()
        up.wait()
        until(
            lambda: not any(is_alive(pid) for pid in children.values()), 90, "all children are gone"
        )


def test_a_worker_that_is_killed_comes_back_and_registers_again(
    config: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    output = tmp_path / "output"
    with running("up", str(config), "--log-dir", str(logs), output=output) as up:
        until(lambda: "Ctrl-C stops all" in output.read_text(), START_S, "serving")
        killed = children_of(up.pid)["encode-0"]
        os.kill(killed, signal.SIGKILL)
        until(
            lambda: children_of(up.pid).get("encode-0") not in (None, killed), 15, "a new process"
        )
        until(lambda: status(config)["encode-0"] == "ready", START_S, "encode-0 is ready again")
        up.send_signal(signal.SIGTERM)
        assert up.wait(30) == 0
    assert "killed by SIGKILL; starting again in 0.5 s" in (logs / "encode-0.log").read_text()


def test_a_second_one_at_the_same_port_ends_before_it_starts_anything(
    config: Path, tmp_path: Path
) -> None:
    coordinator = yaml.safe_load(config.read_text())["coordinator"]
    output = tmp_path / "output"
    with (
        socket.create_server(("127.0.0.1", coordinator["port"])),
        running("up", str(config), output=output) as up,
    ):
        assert up.wait(START_S) == 2
    assert output.read_text().splitlines() == [
        f"epd: port {coordinator['port']} of 127.0.0.1 is in use: set coordinator.port, or stop "
        "what uses it"
    ]


def test_a_worker_that_cannot_work_ends_it_with_the_workers_own_words(
    config: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load(config.read_text())
    document["pools"]["decode"]["worker"]["transfer_protocol"] = "rdma"
    config.write_text(yaml.safe_dump(document))
    output = tmp_path / "output"
    with running("up", str(config), output=output) as up:
        assert up.wait(START_S) == 2
    last = output.read_text().splitlines()[-1]
    assert last.startswith("epd: decode-0: ")
    assert "rdma" in last
