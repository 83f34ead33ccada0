"""What an SGLang server says of itself, turned into liveness, readiness and load, kept apart.

- **liveness**: it answers, and its scheduler makes progress. A server that is only busy answers
  slowly but moves; one that is stuck answers and does not move.
- **readiness**: it may be given requests.
- **load**: how much it has to do. A high load is neither a fault nor a reason to restart.

The encode server has no load of its own to show: the coordinator counts what it placed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd.wire import Load

# Per-queue counts of /v1/loads (managers/load_snapshot.py, 0.5.23) that hold requests which are
# neither running nor counted as waiting.
_QUEUES = (
    "prefill_bootstrap_queue_reqs",
    "prefill_inflight_queue_reqs",
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
    "decode_retracted_queue_reqs",
)
_SIGNS_OF_PROGRESS = (
    "timestamp",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "total_prefill_busy_us",
)


def load_of(body: Mapping[str, Any]) -> Load:
    """The load of a whole server from the body of `GET /v1/loads`, summed over its ranks."""
    ranks: Sequence[Mapping[str, Any]] = body.get("loads") or ()
    return Load(
        num_running_reqs=_sum(ranks, "num_running_reqs"),
        num_waiting_reqs=_sum(ranks, "num_waiting_reqs")
        + sum(_sum([rank.get("disaggregation") or {} for rank in ranks], name) for name in _QUEUES),
        num_waiting_tokens=_sum(ranks, "num_waiting_uncached_tokens"),
        num_used_tokens=_sum(ranks, "num_used_tokens"),
        max_total_num_tokens=_sum(ranks, "max_total_num_tokens"),
    )


@dataclass(slots=True)
class Progress:
    """Decides from one answer after another whether the server still moves.

    Args:
        stall_s: silence, or work without movement, for longer than this means stuck.
        now_s: when the server became ready.
    """

    stall_s: float
    now_s: float
    load: Load
    """The latest load; the last known while the server is silent."""
    _signs: tuple[Any, ...] = ()
    _moved_s: float = 0.0
    _answered_s: float = 0.0

    def __post_init__(self) -> None:
        self._moved_s = self._answered_s = self.now_s

    def answered(self, body: Mapping[str, Any] | None, now_s: float) -> None:
        """The server answered; `body` is that of `/v1/loads`, None if the stage has none."""
        self.now_s = self._answered_s = now_s
        if body is None:
            self._moved_s = now_s
            return
        self.load = load_of(body)
        is_idle = not self.load.num_running_reqs and not self.load.num_waiting_reqs
        signs = tuple(
            rank.get(name) for rank in body.get("loads") or () for name in _SIGNS_OF_PROGRESS
        )
        # An idle scheduler may publish nothing new for as long as nobody asks anything of it.
        if is_idle or signs != self._signs:
            self._moved_s = now_s
        self._signs = signs

    def silent(self, now_s: float) -> None:
        """The server did not answer in time."""
        self.now_s = now_s

    @property
    def fault(self) -> str | None:
        """Why the server counts as stuck; None while it lives."""
        if self.now_s - self._answered_s > self.stall_s:
            return f"it has not answered for {self.now_s - self._answered_s:.0f} s"
        if self.now_s - self._moved_s > self.stall_s:
            return f"it has work and has not moved for {self.now_s - self._moved_s:.0f} s"
        return None

    @property
    def is_responsive(self) -> bool:
        """Whether it answered the latest probe: new work goes elsewhere while it does not."""
        return self._answered_s >= self.now_s


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(part.get(name) or 0) for part in parts)
