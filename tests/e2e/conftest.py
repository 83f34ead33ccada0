from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from epd.engines.torch.tiny import write_random_checkpoint

    path = tmp_path_factory.mktemp("checkpoint") / "random-vl"
    write_random_checkpoint(path, seed=1)
    return path


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Cluster]:
    """One deployment for all tests that do not break it."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), str(checkpoint))
    try:
        yield cluster.start()
    finally:
        cluster.stop()
