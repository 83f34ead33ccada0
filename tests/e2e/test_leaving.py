"""A worker's process ends soon after its work, and soon after a wish to stop that comes early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import START_S

pytestmark = pytest.mark.cluster

LEAVING_S = 15.0
"""Far less than the minute for which the patches below block, on a busy machine too."""
SLOW_TEARDOWN = """
import atexit, time
atexit.register(time.sleep, 60)
"""
SLOW_LOADING = """
import time
from epd.engines.torch import build
def load(*_):
    print("loading", flush=True)
    time.sleep(60)
build.load_language = load
"""


@contextmanager
def worker(
    patch: str, checkpoint: Path, folder: Path, until: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A decode worker without a coordinator, begun until it has written `until`."""
    log = folder / "log"
    token = folder / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    code = f"{patch}\nfrom epd.cli.main import main\nmain()"
    options = ["--stage", "decode", "--model", str(checkpoint), "--token-file", str(token)]
    options += ["--coordinator", "http://127.0.0.1:1", "--threads", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "launch", *options], stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + START_S
        while until not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_drained_worker_does_not_wait_for_pythons_teardown(
    checkpoint: Path, tmp_path: Path
) -> None:
    with worker(SLOW_TEARDOWN, checkpoint, tmp_path, "ready at") as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LEAVING_S) == 0
    assert "SIGTERM: draining" in (tmp_path / "log").read_text()


def test_a_worker_that_loads_weights_leaves_without_them(checkpoint: Path, tmp_path: Path) -> None:
    with worker(SLOW_LOADING, checkpoint, tmp_path, "loading") as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LEAVING_S) == 0
    assert "ready at" not in (tmp_path / "log").read_text()
