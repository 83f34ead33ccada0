"""What every benchmark says besides its figures, so that a run can be repeated and compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure measured several times: its median, and how far the others lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))

    def to_dict(self, digits: int = 4) -> dict[str, float]:
        return {
            "median": round(self.median, digits),
            "low": round(self.low, digits),
            "high": round(self.high, digits),
        }


def machine() -> dict[str, Any]:
    """The machine a benchmark ran on."""
    return {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def versions(packages: Iterable[str]) -> Mapping[str, str]:
    """Installed versions of distributions; those not installed are left out."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
