"""The whole worker, with a fake server in SGLang's place and a fake coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.auth import ClusterToken
from epd.config import WorkerConfig, build
from epd.config.load import OPTIONS
from epd.engines.sglang.gpus import claim
from epd.engines.sglang.worker import run_sglang_worker
from epd.engines.shell import Lifecycle
from epd.errors import ConfigError, WorkerError
from epd.types import WorkerState
from epd.wire import WorkerReport
from tests.engines.shell.fake_registry import FakeRegistry

SECRET = "a-token-for-tests-only"
FAKE = (sys.executable, "-m", "tests.engines.sglang.fake_server")


class Behaviour:
    """What the fake server is told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "behaviour.json"
        self.now: dict[str, Any] = {}
        self.set()

    def set(self, **fields: Any) -> None:
        self.now |= fields
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.now))
        draft.replace(self.path)

    def pids(self) -> list[tuple[int, int]]:
        """(server, its child) of each life."""
        pids = self.path.with_name("pids")
        lines = pids.read_text().splitlines() if pids.exists() else []
        return [(int(a), int(b)) for a, b in (line.split() for line in lines)]


@pytest.fixture
def behaviour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    behaviour = Behaviour(tmp_path)
    monkeypatch.setenv("FAKE_SGLANG_BEHAVIOUR", str(behaviour.path))
    monkeypatch.setenv("EPD_CLUSTER_TOKEN", SECRET)
    yield behaviour
    for pid in (pid for pids in behaviour.pids() for pid in pids):
        # Killed, but perhaps not yet off the processor.
        deadline_s = time.monotonic() + 2
        while is_alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not is_alive(pid), "something of the server was left"


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    registry = FakeRegistry(token=ClusterToken(SECRET))
    await registry.start()
    yield registry
    await registry.stop()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def config(registry: FakeRegistry, folder: Path, **fields: Any) -> WorkerConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    settings = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "max_position_embeddings": 128,
        "vision_config": {},
    }
    (model / "config.json").write_text(json.dumps(settings))
    (model / "model.safetensors").write_bytes(b"")
    values = {
        "stage": "decode",
        "model": str(model),
        "engine": "sglang",
        "coordinator": registry.url,
        "worker_id": "w1",
        "server_log": str(folder / "server.log"),
        "request_timeout_s": 1.5,
        "drain_s": 2.0,
        **fields,
    }
    return build(WorkerConfig, values, source=OPTIONS)


@asynccontextmanager
async def worker(config: WorkerConfig) -> AsyncIterator[Lifecycle]:
    lifecycle = Lifecycle()
    running = asyncio.create_task(
        run_sglang_worker(config, lifecycle=lifecycle, command=FAKE, sglang_version="0.5.23")
    )
    try:
        yield lifecycle
    finally:
        lifecycle.stop()
        await asyncio.wait([running], timeout=10)
        assert running.done()
        running.result()


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Processes tell nobody when they begin or end, so they are looked at."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def ready(report: WorkerReport) -> bool:
    return report.state is WorkerState.READY


async def test_a_server_is_ready_when_it_has_worked_and_says_goodbye(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    behaviour.set(ready=False, loads={"loads": [{"num_running_reqs": 0, "num_used_tokens": 7}]})
    async with worker(config(registry, tmp_path)):
        await registry.wait_for(lambda r: r.state is WorkerState.STARTING)
        await asyncio.sleep(0.5)
        assert not any(map(ready, registry.reports))
        behaviour.set(ready=True)
        report = await registry.wait_for(ready, timeout_s=20)
        assert (report.engine, report.stage) == ("sglang", "decode")
        await registry.wait_for(lambda r: r.load.num_used_tokens == 7, timeout_s=20)
    assert registry.reports[-1].state is WorkerState.GONE
    assert "fake sglang begins" in (tmp_path / "server.log").read_text()


async def test_a_prefill_server_gets_the_coordinators_slots(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with worker(config(registry, tmp_path, stage="prefill")):
        report = await registry.wait_for(ready, timeout_s=20)
    log = (tmp_path / "server.log").read_text()
    assert f"--encoder-urls {registry.url}/enc/0" in log
    assert f"--disaggregation-bootstrap-port {report.bootstrap_port}" in log


async def test_a_killed_server_is_a_new_life_at_once_and_comes_back(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with worker(config(registry, tmp_path)):
        first = await registry.wait_for(ready, timeout_s=20)
        os.kill(behaviour.pids()[0][0], signal.SIGKILL)
        lost = await registry.wait_for(lambda r: r.epoch > first.epoch, timeout_s=3)
        assert lost.state is WorkerState.STARTING
        again = await registry.wait_for(lambda r: r.epoch > first.epoch and ready(r), timeout_s=20)
        assert again.url == first.url
        assert len(behaviour.pids()) == 2


async def test_a_server_that_falls_silent_gets_no_work_and_is_replaced(
    behaviour: Behaviour,
    registry: FakeRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.engines.sglang.probe.PROBE_TIMEOUT_S", 0.5)
    async with worker(config(registry, tmp_path, request_timeout_s=4)):
        first = await registry.wait_for(ready, timeout_s=20)
        os.kill(behaviour.pids()[0][0], signal.SIGSTOP)
        registry.reports.clear()
        silent = await registry.wait_for(lambda r: r.state is WorkerState.STARTING)
        assert silent.epoch == first.epoch, "not yet given up"
        await registry.wait_for(lambda r: r.epoch > first.epoch and ready(r), timeout_s=20)


async def test_a_server_with_work_that_does_not_move_is_replaced(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with worker(config(registry, tmp_path)):
        first = await registry.wait_for(ready, timeout_s=20)
        behaviour.set(loads={"loads": [{"num_running_reqs": 1, "timestamp": 1.0}]})
        await registry.wait_for(lambda r: r.epoch > first.epoch, timeout_s=20)
        behaviour.set(loads={"loads": []})


async def test_a_draining_server_finishes_what_runs(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with worker(config(registry, tmp_path, drain_s=10, request_timeout_s=60)) as lifecycle:
        await registry.wait_for(ready, timeout_s=20)
        behaviour.set(loads={"loads": [{"num_running_reqs": 1}]})
        await registry.wait_for(lambda r: r.load.num_running_reqs == 1, timeout_s=20)
        lifecycle.stop()
        await registry.wait_for(lambda r: r.state is WorkerState.DRAINING)
        await asyncio.sleep(1.5)
        assert is_alive(behaviour.pids()[0][0])
        behaviour.set(loads={"loads": []})


async def test_a_wrong_flag_is_told_and_not_tried_again(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    behaviour.set(exit=2, words="epd: SGLang 0.5.23 has no flag --nope")
    with pytest.raises(ConfigError, match=r"^SGLang 0\.5\.23 has no flag --nope$"):
        async with worker(config(registry, tmp_path)):
            await asyncio.sleep(5)
    assert (tmp_path / "server.log").read_text().count("fake sglang begins") == 1


async def test_a_server_that_never_gets_ready_is_given_up_with_its_last_words(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    behaviour.set(exit=1, words="RuntimeError: out of memory\nsome tail")
    with pytest.raises(WorkerError, match=r"ended with code 1: RuntimeError: out of memory"):
        async with worker(config(registry, tmp_path)):
            await asyncio.sleep(15)
    assert (tmp_path / "server.log").read_text().count("fake sglang begins") == 3


async def test_a_model_that_takes_too_long_is_given_up(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    behaviour.set(ready=False)
    with pytest.raises(WorkerError, match="not ready after start_s"):
        async with worker(config(registry, tmp_path, start_s=0.5)):
            await asyncio.sleep(15)


async def test_a_worker_told_to_stop_before_it_is_ready_leaves_nothing(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    behaviour.set(ready=False)
    async with worker(config(registry, tmp_path)):
        await registry.wait_for(lambda r: r.state is WorkerState.STARTING)
        await until(behaviour.pids)
    assert registry.reports[-1].state is WorkerState.GONE


async def test_nothing_is_left_of_a_server_whose_worker_is_killed(
    behaviour: Behaviour, registry: FakeRegistry, tmp_path: Path
) -> None:
    settings = config(registry, tmp_path)
    program = (
        "import asyncio, sys\n"
        "from epd.config import WorkerConfig\n"
        "from epd.engines.sglang.worker import run_sglang_worker\n"
        "config = WorkerConfig.model_validate_json(sys.argv[1])\n"
        f"asyncio.run(run_sglang_worker(config, command={FAKE!r}, sglang_version='0.5.23'))\n"
    )
    given = settings.model_dump_json(exclude_unset=True)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, given)
    await registry.wait_for(ready, timeout_s=20)
    server, child = behaviour.pids()[0]
    process.kill()
    await process.wait()
    await until(lambda: not is_alive(server))
    # A grandchild of the fake: SGLang's own ask the kernel to die with their parent.
    os.kill(child, signal.SIGKILL)
    await until(lambda: not is_alive(child))


def test_two_workers_cannot_claim_one_gpu(tmp_path: Path) -> None:
    with (
        claim((0, 1), folder=tmp_path),
        pytest.raises(ConfigError, match=rf"GPU 1 is used .*process {os.getpid()}"),
        claim((1, 2), folder=tmp_path),
    ):
        pass
    with claim((1, 2), folder=tmp_path):
        pass
