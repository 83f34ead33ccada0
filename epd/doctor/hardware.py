"""GPU, RDMA and the limit on locked memory: none is needed for the demo on a CPU."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

from epd.doctor.check import Check, Verdict

_TIMEOUT_S = 30.0
_CUDA_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def check_gpu(smi: str = "nvidia-smi") -> Check:
    """Which GPUs there are, and whether the installed torch can use them."""
    name = "GPU"
    if shutil.which(smi) is None:
        return Check(name, Verdict.ABSENT, f"no {smi}; workers run with --device cpu")
    listed = _run([smi, "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if not listed:
        remedy = "see whether the driver is loaded"
        return Check(name, Verdict.WARNING, f"{smi} finds no GPU", remedy)
    gpus = f"{len(listed)}: {listed[0]}"
    # In a process of its own: importing torch takes seconds and CUDA may hang on a sick GPU.
    counted = _run([sys.executable, "-c", _CUDA_PROBE])
    if not counted or counted[-1] == "0":
        remedy = "install a CUDA build of torch to use --device cuda"
        return Check(name, Verdict.WARNING, f"{gpus}, but this torch cannot use it", remedy)
    return Check(name, Verdict.OK, gpus)


def check_rdma(devices: Path = Path("/sys/class/infiniband")) -> Check:
    """RDMA devices the kernel knows."""
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not found:
        return Check("RDMA", Verdict.ABSENT, "no RDMA device; transfers use TCP")
    return Check("RDMA", Verdict.OK, f"{', '.join(found)}: use --transfer-protocol rdma")


def check_locked_memory(*, has_rdma: bool, limit_bytes: int | None = None) -> Check:
    """RDMA pins the arenas; TCP does not."""
    name = "locked memory"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    if soft == resource.RLIM_INFINITY:
        return Check(name, Verdict.OK, "unlimited")
    detail = f"limit {soft / 2**20:.0f} MiB"
    if has_rdma:
        remedy = "RDMA registers whole arenas: run ulimit -l unlimited"
        return Check(name, Verdict.WARNING, detail, remedy)
    return Check(name, Verdict.OK, f"{detail}; TCP needs none")


def _run(command: list[str]) -> list[str]:
    """The lines a command prints; none if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
