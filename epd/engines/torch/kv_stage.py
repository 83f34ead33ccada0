"""What prefill and decode workers have in common: a KV pool, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epd.engines.shell import Shell
from epd.engines.torch.kv_lender import KVLender
from epd.transfer import TransferEngine
from epd.wire import KVLayout, Load


@dataclass(frozen=True, slots=True)
class KVStage:
    """One per prefill or decode worker."""

    shell: Shell
    lender: KVLender
    transfer: TransferEngine
    layout: KVLayout
    num_parameters: int

    def load(self, *, num_running: int, num_waiting_tokens: int) -> Load:
        """The worker's load; who is here and does not run, waits."""
        pool, requests = self.lender.pool, self.shell.requests
        return Load(
            num_running_reqs=num_running,
            num_waiting_reqs=max(0, len(requests) - num_running),
            num_waiting_tokens=num_waiting_tokens,
            num_used_tokens=self.lender.num_lent_blocks * pool.shape.block_tokens,
            max_total_num_tokens=pool.max_tokens,
            num_completed_reqs=requests.num_completed,
        )

    def describe(self) -> dict[str, Any]:
        """The stage's part of `/server_info`."""
        return {
            "session_id": self.transfer.session_id,
            "num_parameters": self.num_parameters,
            "model_fingerprint": self.layout.model_fingerprint,
            "kv_layout": self.layout.model_dump(),
            "max_total_num_tokens": self.lender.pool.max_tokens,
        }

    def publish_gauges(self) -> None:
        """The pool's gauges; what is lent is needed, since nothing is cached."""

        def lent_bytes() -> int:
            return self.lender.num_lent_blocks * self.lender.pool.shape.block_bytes

        self.shell.metrics.arena_gauges("kv", used_bytes=lent_bytes, pinned_bytes=lent_bytes)
        self.shell.metrics.gauge(
            "epd_kv_blocks_used",
            "KV blocks that requests hold",
            lambda: self.lender.num_lent_blocks,
        )
