"""From a worker's configuration to the flags of its SGLang server. Pure: no process is looked at.

Every flag that makes the role (who the server is, where it listens, whom it talks to) is composed
here and refused from the user. Flags with a sensible default are composed too, and a user's own
value wins. All others are the user's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd.config import WorkerConfig
from epd.engines.sglang.cpu.settings import CPU_FLAGS, CPU_STAGE_FLAGS
from epd.engines.sglang.kv_tier import tier_flags
from epd.errors import ConfigError
from epd.types import Stage

Flag = tuple[str, str | None]
"""A flag and its value; None for one that takes no value."""

OWNED: Mapping[str, str] = {
    "--config": "sglang_flags",
    "--model": "--model",
    "--model-path": "--model",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
    "--device": "--device",
    "--base-gpu-id": "--gpus",
    "--gpu-id-step": "--gpus",
    "--tp": "--tp",
    "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--dp": "--dp",
    "--dp-size": "--dp",
    "--data-parallel-size": "--dp",
    "--pp": "--pp",
    "--pp-size": "--pp",
    "--pipeline-parallel-size": "--pp",
    "--encoder-only": "--stage",
    "--language-only": "--stage",
    "--language-model-only": "--stage",
    "--disaggregation-mode": "--stage",
    "--encoder-urls": "--coordinator",
    "--encoder-register-urls": "--coordinator",
    "--encoder-transfer-backend": "--embedding-transport",
    "--enable-adaptive-dispatch-to-encoder": "--stage",
    "--enable-prefix-mm-cache": "--embedding-cache",
    "--enable-mm-global-cache": "--embedding-cache",
    "--disaggregation-bootstrap-port": "--bootstrap-port",
    "--disaggregation-transfer-backend": "--transfer-protocol",
    "--disaggregation-ib-device": "--transfer-device",
    "--enable-hierarchical-cache": "--kv-tier",
    "--enable-hicache": "--kv-tier",
    "--hicache-storage-backend": "--kv-tier",
}
"""Flags that EPD composes, and the option of `epd launch` that decides each."""

_TORCH_ONLY = ("embedding_bytes", "kv_bytes", "threads")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens. All but `http` matter to a prefill server only."""

    http: int
    bootstrap: int = 0
    """Where decode asks for rooms."""
    encoders: int = 0
    """Where encoders could register; SGLang listens there, though ours come as slots."""


def compose(
    config: WorkerConfig, *, model: str, served_name: str, ports: Ports, encoder_urls: Sequence[str]
) -> list[str]:
    """The arguments of `sglang serve` for this worker.

    Args:
        config: the worker's configuration; its `sglang_flags` come last.
        model: folder or hub name of the checkpoint.
        served_name: the name clients use.
        ports: chosen ports, none 0.
        encoder_urls: the coordinator's encoder slots; for a prefill server only.

    Raises:
        ConfigError: the configuration contradicts itself; the message names both sides.
    """
    check_contradictions(config)
    flags: list[Flag] = [
        ("--model-path", model),
        ("--served-model-name", served_name),
        ("--host", config.host),
        ("--port", str(ports.http)),
        *_parallelism(config),
        *_role(config, ports, encoder_urls),
    ]
    flags += _without(_defaults(config, ports), flag_names(config.sglang_flags))
    argv: list[str] = []
    for name, value in flags:
        argv += [name] if value is None else [name, *value.split(" ")]
    return [*argv, *config.sglang_flags]


def flag_names(argv: Sequence[str]) -> frozenset[str]:
    """The names of the flags in `argv`, without their values."""
    return frozenset(word.split("=", 1)[0] for word in argv if word.startswith("--"))


def check_contradictions(config: WorkerConfig) -> None:
    """Raises ConfigError if two settings, or a setting and a user's flag, cannot both be."""
    for name in sorted(flag_names(config.sglang_flags)):
        if name in OWNED:
            raise ConfigError(
                f"{name} is composed by EPD: say it with {OWNED[name]} and not among SGLang's flags"
            )
    for name in _TORCH_ONLY:
        if name in config.model_fields_set:
            raise ConfigError(f"{name} is a setting of the torch engine; SGLang has no such limit")
    is_cpu = config.device == "cpu" and not config.gpus
    if config.gpus and config.device.startswith("cuda:"):
        raise ConfigError(f"device {config.device} and gpus both name GPUs: give gpus only")
    if is_cpu and config.transfer_protocol == "rdma":
        raise ConfigError("transfer_protocol rdma needs GPUs: name them with gpus")
    if is_cpu and config.kv_tier != "off":
        # mem_cache/pool_host/common.py (0.5.23) registers the tier's memory with CUDA.
        raise ConfigError("kv_tier needs GPUs: SGLang's hierarchical cache does not run on a CPU")
    if is_cpu and config.num_gpus > 1:
        raise ConfigError("tp, dp and pp above 1 need GPUs: name them with gpus")
    if config.transfer_device and config.transfer_protocol == "tcp":
        raise ConfigError("transfer_device names RDMA devices: give transfer_protocol rdma too")
    if config.stage is Stage.ENCODE and config.kv_tier != "off":
        raise ConfigError("kv_tier is for prefill and decode: an encode worker holds no KV cache")
    if config.stage is Stage.ENCODE and config.pp > 1:
        raise ConfigError("pp above 1 is for prefill and decode: an encoder has no pipeline")
    _check_role_switch(config)


def _check_role_switch(config: WorkerConfig) -> None:
    # arg_groups/pd_disaggregation_hook.py (0.5.23), and crashes seen with the radix cache on.
    names = flag_names(config.sglang_flags)
    if "--enable-pd-role-switch" not in names:
        return
    if config.pp > 1 or "--speculative-algorithm" in names:
        raise ConfigError("--enable-pd-role-switch works without pp and speculation only")
    if "--disable-radix-cache" not in names:
        raise ConfigError(
            "--enable-pd-role-switch needs --disable-radix-cache: a switched server crashed "
            "with the cache on"
        )


def _parallelism(config: WorkerConfig) -> list[Flag]:
    flags: list[Flag] = []
    for name, value in (
        ("--tp-size", config.tp),
        ("--dp-size", config.dp),
        ("--pp-size", config.pp),
    ):
        if value > 1:
            flags.append((name, str(value)))
    return flags


def _role(config: WorkerConfig, ports: Ports, encoder_urls: Sequence[str]) -> list[Flag]:
    backend = {"zmq": "zmq_to_scheduler", "mooncake": "mooncake"}[config.embedding_transport]
    if config.stage is Stage.ENCODE:
        flags: list[Flag] = [("--encoder-only", None), ("--encoder-transfer-backend", backend)]
        if config.embedding_cache == "prefix":
            flags.append(("--enable-prefix-mm-cache", None))
        elif config.embedding_cache == "global":
            flags.append(("--enable-mm-global-cache", None))
        return flags
    transfer = "mooncake" if config.transfer_protocol == "rdma" else "mooncake_tcp"
    flags = [
        ("--language-only", None),
        ("--disaggregation-mode", str(config.stage)),
        ("--disaggregation-transfer-backend", transfer),
    ]
    if config.transfer_device:
        flags.append(("--disaggregation-ib-device", config.transfer_device))
    if config.stage is Stage.PREFILL:
        # A decode server without encoder URLs holds no vision weights and encodes nothing.
        flags += [
            ("--encoder-transfer-backend", backend),
            ("--encoder-urls", " ".join(encoder_urls)),
            ("--disaggregation-bootstrap-port", str(ports.bootstrap)),
        ]
    return flags


def _defaults(config: WorkerConfig, ports: Ports) -> list[Flag]:
    """Flags that a user may replace by naming them."""
    flags: list[Flag] = [("--enable-metrics", None), ("--log-level", config.log_level)]
    if config.mem_fraction is not None:
        flags.append(("--mem-fraction-static", str(config.mem_fraction)))
    if config.context_tokens is not None:
        flags.append(("--context-length", str(config.context_tokens)))
    if config.kv_cache_dtype is not None and config.stage is not Stage.ENCODE:
        flags.append(("--kv-cache-dtype", config.kv_cache_dtype))
    given = config.model_fields_set
    if "max_running_requests" in given and config.stage is not Stage.ENCODE:
        flags.append(("--max-running-requests", str(config.max_running_requests)))
    if config.stage is Stage.PREFILL:
        # 8997 by default: a second prefill server on the host could not have it.
        flags.append(("--encoder-bootstrap-port", str(ports.encoders)))
        if "chunk_tokens" in given:
            flags.append(("--chunked-prefill-size", str(config.chunk_tokens)))
    flags += tier_flags(config)
    if config.device == "cpu" and not config.gpus:
        flags += [*CPU_FLAGS, *CPU_STAGE_FLAGS.get(config.stage, ())]
    return flags


def _without(flags: Sequence[Flag], names: frozenset[str]) -> list[Flag]:
    return [flag for flag in flags if flag[0] not in names]
