"""Real deployments under `epd up` and `epd demo`, seen from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

from epd.auth import TOKEN_VARIABLE

START_S = 90.0


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def children_of(pid: int) -> dict[str, int]:
    """Name → process id of the coordinator and the workers that `pid` started."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            argv = (entry / "cmdline").read_text().split("\0")
            if parent == pid and "epd" in argv:
                options = dict(a[2:].split("=", 1) for a in argv if a.startswith("--") and "=" in a)
                found[options.get("worker-id", "coordinator")] = int(entry.name)
    return found


@contextlib.contextmanager
def running(*arguments: str, output: Path, **environ: str) -> Generator[subprocess.Popen[bytes]]:
    """`epd ARGUMENTS` in the background, its output in a file; killed at the end."""
    env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **environ}
    env.pop(TOKEN_VARIABLE, None)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "epd", *arguments], stdout=file, stderr=file, env=env
        )
    started: dict[str, int] = {}
    try:
        yield process
    finally:
        started = children_of(process.pid)
        process.kill()
        process.wait()
        for pid in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
