"""One deployment of each engine that EPD_TEST_ENGINE names, for all tests here.

`make test` runs them with torch and with sim, `make test-sglang` with the real SGLang on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from epd.checkpoints import resolve
from tests.e2e.cluster import Cluster

ENGINES = os.environ.get("EPD_TEST_ENGINE", "torch,sim").split(",")
MODEL = "tiny-vl"
_SGLANG_START_S = 420.0
"""Four servers that import SGLang at once on two cores, perhaps beside other work."""

if "sglang" in ENGINES:
    # transformers, with which answers are compared, cannot import torchvision without them here.
    from epd.engines.sglang.cpu import stand_ins

    stand_ins.install()

    import torch

    torch.set_num_threads(1)  # four servers share the processors


_OPTIONS = {
    "torch": ("--threads", "1"),
    "sim": ("--context-tokens", "2048"),
    "sglang": ("--drain-s", "10"),
}


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def is_sglang(engine: str) -> bool:
    return engine == "sglang"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return resolve(MODEL)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Cluster]:
    """Two encode workers, one prefill and one decode worker."""
    root = tmp_path_factory.mktemp("contract")
    cluster = Cluster(root, MODEL, worker_options=("--engine", engine, *_OPTIONS[engine]))
    try:
        cluster.start_coordinator()
        cluster.wait_until(cluster.token_file.exists, "a token")
        for stage, name in (
            ("encode", "encode-0"),
            ("encode", "encode-1"),
            ("prefill", "prefill"),
            ("decode", "decode"),
        ):
            extra = ("--server-log", str(root / f"{name}.server.log"))
            cluster.start_worker(stage, name, *(extra if engine == "sglang" else ()))
        wait_all_ready(cluster, 4)
        yield cluster
    finally:
        cluster.stop()


def wait_all_ready(cluster: Cluster, num_workers: int) -> None:
    cluster.wait_until(
        lambda: (
            cluster.get("/health") is not None
            and [w["state"] for w in cluster.workers().values()].count("ready") == num_workers
        ),
        f"{num_workers} workers are ready",
        timeout_s=_SGLANG_START_S if "sglang" in ENGINES else 90.0,
    )


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0, timeout=60)
