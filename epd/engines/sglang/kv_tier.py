"""The shared KV tier: where the KV of agents' and long conversations goes when GPU memory is full.

SGLang's hierarchical cache keeps it in host memory, and behind that in a store that all prefill
servers share, so that a second turn is served from the tier whichever server it reaches. Flags and
variables were read from SGLang 0.5.23: arg_groups/fields/memory.py, mem_cache/hicache_storage.py,
mem_cache/storage/mooncake_store/mooncake_store.py.
"""

from __future__ import annotations

from epd.config import WorkerConfig
from epd.types import Stage


def tier_flags(config: WorkerConfig) -> list[tuple[str, str | None]]:
    """The tier's flags; none where `kv_tier` is off or the stage holds no KV cache."""
    if config.kv_tier == "off" or config.stage is Stage.ENCODE:
        return []
    flags: list[tuple[str, str | None]]
    if config.stage is Stage.DECODE:
        # Answers go to the tier too, so that the next turn's prefill finds them there.
        flags = [("--disaggregation-decode-enable-offload-kvcache", None)]
    else:
        flags = [("--enable-hierarchical-cache", None)]
    if config.kv_tier_gb is not None:
        flags.append(("--hicache-size", str(config.kv_tier_gb)))
    if config.kv_tier != "host":
        flags.append(("--hicache-storage-backend", config.kv_tier))
    return flags


def tier_environment(config: WorkerConfig) -> dict[str, str]:
    """The variables by which SGLang's storage backends are told where the store is."""
    found: dict[str, str] = {}
    if config.kv_tier_master is not None:
        found["MOONCAKE_MASTER"] = config.kv_tier_master
        found["MOONCAKE_PROTOCOL"] = config.transfer_protocol
        if config.transfer_device:
            found["MOONCAKE_DEVICE"] = config.transfer_device
    if config.kv_tier_path is not None:
        name = {
            "file": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
            "hf3fs": "SGLANG_HICACHE_HF3FS_CONFIG_PATH",
        }
        found[name[config.kv_tier]] = str(config.kv_tier_path)
    return found
