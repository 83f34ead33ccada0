"""The environment of an SGLang server. Pure; what the operator has set already wins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from epd.config import WorkerConfig
from epd.engines.sglang.cpu.settings import CPU_ENVIRONMENT
from epd.engines.sglang.kv_tier import tier_environment
from epd.types import Stage

WORKER_VARIABLE = "EPD_SGLANG_WORKER"
"""Set in servers that EPD started: our plugins act in these and in no other SGLang."""

PARENT_VARIABLE = "EPD_SGLANG_PARENT_PID"
"""The worker's process id, for the server to die with it."""
EXIT_USAGE = 2
"""How the server, like SGLang's parser, leaves when a flag is wrong: trying again cannot help."""


def compose_environment(
    config: WorkerConfig, inherited: Mapping[str, str], *, metrics_folder: Path
) -> dict[str, str]:
    """The variables to add to `inherited` for the server of this worker.

    Args:
        config: the worker's configuration.
        inherited: the environment that the server starts from.
        metrics_folder: an empty folder of this worker's own, where an encode server counts.
    """
    wait_s = str(int(config.request_timeout_s) or 1)
    defaults = {
        # Else it advertises the first address of the machine that is not loopback.
        "SGLANG_HOST_IP": config.advertised_host,
        # 180 to 1800 s by default, during which a dead peer holds up a request.
        "SGLANG_ENCODER_HTTP_TIMEOUT": wait_s,
        "SGLANG_ENCODER_RECV_TIMEOUT": wait_s,
        "SGLANG_ENCODER_REQ_TIMEOUT": wait_s,
        "SGLANG_ENCODER_SEND_TIMEOUT": wait_s,
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": wait_s,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": wait_s,
        # For ever: a prefill server that forgot its encoder slots while the coordinator was away
        # (600 s by default) would need a restart.
        "SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL": "0",
        # 20 s by default. A probe that waits longer than our own deadline says nothing.
        "SGLANG_HEALTH_CHECK_TIMEOUT": "5",
        **tier_environment(config),
    }
    if config.stage is Stage.ENCODE:
        defaults["SGLANG_ENCODER_MAX_BATCH_SIZE"] = str(_max_batch_size(config))
        # SGLang sets it too, but after its metrics library has looked: /metrics stays empty.
        defaults["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_folder)
    if config.transfer_protocol == "tcp":
        defaults["MC_FORCE_TCP"] = "1"
    if config.device == "cpu" and not config.gpus:
        defaults |= CPU_ENVIRONMENT
    found = {name: value for name, value in defaults.items() if name not in inherited}
    found[WORKER_VARIABLE] = "1"
    if visible := visible_gpus(config):
        found["CUDA_VISIBLE_DEVICES"] = visible
    return found


def encode_window(config: WorkerConfig) -> int:
    """Image parts to have at an encode server at once: one batch at work and one on the way."""
    return 2 * _max_batch_size(config)


def _max_batch_size(config: WorkerConfig) -> int:
    # The prefix cache neither answers nor learns from a batch of several requests
    # (disaggregation/encoder/server.py:1745, 0.5.23). 8 is SGLang's own default.
    return 1 if config.embedding_cache == "prefix" else 8


def visible_gpus(config: WorkerConfig) -> str:
    """The value of CUDA_VISIBLE_DEVICES; empty to leave it as it is."""
    if config.gpus:
        return ",".join(map(str, config.gpus))
    return config.device.partition(":")[2]
