"""The data plane: libibverbs, and whether Mooncake really moves bytes here."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence

from epd.doctor.check import Check, Verdict

_SELF_TRANSFER = (sys.executable, "-m", "epd.doctor.self_transfer")
_DEADLINE_S = 30.0


def check_libibverbs(library: str = "libibverbs.so.1") -> Check:
    """Mooncake links it even where only TCP is used."""
    name = "libibverbs"
    if sys.platform != "linux":
        detail = f"Mooncake does not run on {sys.platform}"
        return Check(name, Verdict.PROBLEM, detail, "run the workers on Linux")
    try:
        ctypes.CDLL(library)
    except OSError as exc:
        remedy = "apt-get install libibverbs1 (Fedora, RHEL: dnf install libibverbs)"
        return Check(name, Verdict.PROBLEM, str(exc), remedy)
    return Check(name, Verdict.OK, library)


def check_self_transfer(
    command: Sequence[str] = _SELF_TRANSFER, *, deadline_s: float = _DEADLINE_S
) -> Check:
    """Have one engine write to another over loopback.

    In a process of its own, under a deadline: a broken installation can crash or hang.
    """
    name = "Mooncake"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"the self-transfer did not end within {deadline_s:.0f} s"
        remedy = "see whether a firewall closes loopback ports, or MC_* variables are set"
        return Check(name, Verdict.PROBLEM, detail, remedy)
    words = done.stdout if done.returncode == 0 else done.stderr
    lines = words.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    if done.returncode == 0:
        return Check(name, Verdict.OK, last)
    if done.returncode < 0:
        detail = f"the self-transfer was killed by {signal.Signals(-done.returncode).name}"
        remedy = "install exactly one of the mooncake-transfer-engine packages, afresh"
        return Check(name, Verdict.PROBLEM, detail, remedy)
    return Check(name, Verdict.PROBLEM, last, "see docs/troubleshooting.md, Mooncake")
