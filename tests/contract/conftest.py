"""One deployment of the engine that EPD_TEST_ENGINE names, for all tests here.

`make test` runs them with torch, `make test-sglang` with the real SGLang on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from epd.checkpoints import resolve
from tests.e2e.cluster import Cluster

ENGINE = os.environ.get("EPD_TEST_ENGINE", "torch")
MODEL = "tiny-vl"
_SGLANG_START_S = 420.0
"""Four servers that import SGLang at once on two cores, perhaps beside other work."""

if ENGINE == "sglang":
    # transformers, with which answers are compared, cannot import torchvision without them here.
    from epd.engines.sglang.cpu import stand_ins

    stand_ins.install()

    import torch

    torch.set_num_threads(1)  # four servers share the processors


@pytest.fixture(scope="session")
def is_sglang() -> bool:
    return ENGINE == "sglang"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return resolve(MODEL)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two encode workers, one prefill and one decode worker."""
    root = tmp_path_factory.mktemp("contract")
    options = ("--engine", ENGINE)
    options += ("--drain-s", "10") if ENGINE == "sglang" else ("--threads", "1")
    cluster = Cluster(root, MODEL, worker_options=options)
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
            cluster.start_worker(stage, name, *(extra if ENGINE == "sglang" else ()))
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
        timeout_s=_SGLANG_START_S if ENGINE == "sglang" else 90.0,
    )


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0, timeout=60)
