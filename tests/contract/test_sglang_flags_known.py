"""Every flag that EPD composes is one that the installed SGLang's own parser knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from epd.config import WorkerConfig, build, load_deployment
from epd.config.load import OPTIONS
from tests.config.test_cluster_configs import GPU_CONFIGS, argv, workers
from tests.contract.conftest import ENGINES

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("sglang" not in ENGINES, reason="needs SGLang: make test-sglang"),
]

VARIANTS: list[dict[str, Any]] = [
    {"kv_tier": "host", "kv_tier_gb": 8},
    {"kv_tier": "file", "kv_tier_path": "/kv"},
    {"kv_tier": "mooncake", "kv_tier_master": "10.0.0.1:50051"},
    {"kv_tier": "hf3fs", "kv_tier_path": "/etc/hf3fs.json"},
    {"embedding_cache": "global", "kv_tier_master": "10.0.0.1:50051"},
    {"kv_cache_dtype": "fp8_e4m3", "chunk_tokens": 4096, "max_running_requests": 32},
    {"gpus": "0,1,2,3", "tp": 2, "pp": 2},
    {"gpus": "0,1,2,3", "tp": 2, "dp": 2},
]


def composed() -> list[list[str]]:
    found = [argv(worker) for path in GPU_CONFIGS for worker in workers(load_deployment(path))]
    for stage in ("encode", "prefill", "decode"):
        for variant in VARIANTS:
            if stage == "encode" and {"kv_tier", "pp"} & set(variant):
                continue
            values = {"stage": stage, "model": "m", "engine": "sglang", "gpus": "0", **variant}
            found.append(argv(build(WorkerConfig, values, source=OPTIONS)))
    return found


def run(module: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        check=False,
    )


def test_sglangs_parser_knows_all_that_is_composed() -> None:
    lists = composed()
    assert len(lists) > 20
    result = run("epd.engines.sglang.flag_check", stdin=json.dumps(lists))
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [[]] * len(lists)


@pytest.mark.parametrize("flag", ["--no-such-flag", "--encoder-onl", "--disaggregation-mod"])
def test_a_flag_that_is_gone_is_named_at_once(flag: str) -> None:
    """Even where SGLang itself would take the beginning of another flag for that flag."""
    result = run("epd.engines.sglang.serve", "--model-path", "m", flag)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"epd: SGLang 0.5.23 has no flag {flag}"


def test_a_wrong_value_is_named_too() -> None:
    result = run("epd.engines.sglang.serve", "--model-path", "m", "--disaggregation-mode", "nope")
    assert result.returncode == 2
    assert "--disaggregation-mode: invalid choice: 'nope'" in result.stderr.splitlines()[-1]
