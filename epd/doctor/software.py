"""Python and the packages EPD needs."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from importlib.util import find_spec

from epd.doctor.check import Check, Verdict

_MIN_PYTHON = (3, 11)
_BASE = {
    "aiohttp": "aiohttp",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "rich": "rich",
    "typer": "typer",
    "yarl": "yarl",
}
_TORCH = {
    "jinja2": "jinja2",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
}
"""Distribution → module. Mooncake has a check of its own, since it has three distributions."""
_SHOWN = ("torch", "transformers")


def check_python(version: tuple[int, int] | None = None) -> Check:
    """Whether the interpreter is new enough."""
    found = version or sys.version_info[:2]
    detail = f"{platform.python_version()} at {sys.executable}"
    if found < _MIN_PYTHON:
        return Check("Python", Verdict.PROBLEM, detail, "install Python 3.11 or later")
    return Check("Python", Verdict.OK, detail)


def check_base_packages() -> Check:
    """What the coordinator and the commands import."""
    return _check("packages", _BASE, "in EPD's folder: pip install -e .")


def check_torch_packages() -> Check:
    """What the torch engine imports."""
    return _check("torch engine", _TORCH, "in EPD's folder: pip install -e '.[torch]'")


def _check(name: str, modules: dict[str, str], remedy: str) -> Check:
    missing = [package for package, module in modules.items() if find_spec(module) is None]
    if missing:
        return Check(name, Verdict.PROBLEM, f"missing: {', '.join(missing)}", remedy)
    shown = [f"{p} {importlib.metadata.version(p)}" for p in _SHOWN if p in modules]
    return Check(name, Verdict.OK, ", ".join(shown) or "all there")
