"""Flags and environment of a server that computes on the CPU (SGLang 0.5.23, December 2026)."""

from __future__ import annotations

from collections.abc import Mapping

from epd.types import Stage

CPU_FLAGS: tuple[tuple[str, str | None], ...] = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    # Greedy answers equal transformers' in this precision only.
    ("--dtype", "float32"),
    # Otherwise it takes most of the machine's memory for KV.
    ("--max-total-tokens", "16384"),
)
CPU_STAGE_FLAGS: Mapping[Stage, tuple[tuple[str, str | None], ...]] = {
    # Its other ways to keep the KV of a request it takes back need pinned memory.
    Stage.DECODE: (("--disaggregation-decode-retraction-backup", "cpu_tensor"),),
}
CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Sends cached prefixes through pinned memory.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
    # The pool that embeddings arrive in: 4 GiB by default.
    "SGLANG_EMBEDDING_POOL_SIZE_MB": "64",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
