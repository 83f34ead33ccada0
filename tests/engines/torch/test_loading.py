"""A worker that is told to stop while it loads its weights."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from epd.config import WorkerConfig
from epd.engines.run import run_worker
from epd.engines.shell import Lifecycle
from epd.engines.torch import build
from epd.engines.torch.tiny import write_random_checkpoint
from epd.errors import ConfigError
from epd.transfer import LoopbackNetwork
from epd.types import Stage, WorkerState
from tests.engines.torch.cluster import SECRET, FakeCoordinator


@pytest.mark.parametrize("stage", Stage)
async def test_it_leaves_at_once_and_says_goodbye(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_random_checkpoint(tmp_path / "model", "qwen2_5_vl", seed=1)
    token_file = tmp_path / "token"
    token_file.write_text(SECRET)
    token_file.chmod(0o600)
    is_loading, is_loaded = threading.Event(), threading.Event()

    def load(*_: Any) -> None:
        is_loading.set()
        is_loaded.wait(60)

    monkeypatch.setattr(build, "load_vision", load)
    monkeypatch.setattr(build, "load_language", load)
    coordinator = FakeCoordinator()
    async with coordinator.running():
        config = WorkerConfig(
            stage=stage,
            model=str(tmp_path / "model"),
            coordinator=coordinator.url,
            token_file=token_file,
        )
        lifecycle = Lifecycle()
        transfer = LoopbackNetwork().engine("worker")
        running = asyncio.create_task(run_worker(config, transfer=transfer, lifecycle=lifecycle))
        assert await asyncio.to_thread(is_loading.wait, 30)
        lifecycle.stop()
        async with asyncio.timeout(10):
            await running
        is_loaded.set()
    states = [report.state for report in coordinator.reports]
    assert states[-1] is WorkerState.GONE
    assert WorkerState.READY not in states


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gpus": "0"}, "gpus is a setting of the sglang engine, not of torch: device cuda:0"),
        ({"embedding_cache": "off"}, "embedding_cache is a setting of the sglang engine"),
    ],
)
async def test_settings_of_sglang_are_refused_and_not_ignored(
    setting: dict[str, Any], message: str
) -> None:
    config = WorkerConfig.model_validate({"stage": "encode", "model": "tiny-vl", **setting})
    with pytest.raises(ConfigError, match=message):
        await run_worker(config, transfer=LoopbackNetwork().engine("worker"))
