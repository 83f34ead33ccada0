"""The seam of the data plane: what every engine may ask of a transfer library.

Owns the protocol, the block type, the counters, and the rules of a write that failed. Does not
own memory (`memory.py`), its division (`arena.py`), or who writes what to whom (the engines).
Implemented by `mooncake.py` and, for tests, by `loopback.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

QUARANTINE_S = 30.0
"""How long a destination must rest after a failed write.

With the settings of `mooncake.environment`, Mooncake 0.3.13 over TCP gives up a batch that has
made no progress for 5 s (30 s without them), and the peer's kernel may still deliver what it had
buffered. Measured December 2026, two cores, loopback.
"""

OnSettled = Callable[[], object]
"""Called once, on the event loop, when the library no longer reads the source of a write."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes to copy from this process's memory into a peer's; both addresses are absolute."""

    source: int
    destination: int
    nbytes: int


@dataclass(slots=True)
class TransferStats:
    """Counters of one engine's writes since its start; read by metrics, written by the engine."""

    bytes_moved_total: int = 0
    """Bytes of writes that completed; nothing of a write that failed."""
    num_transfers_total: int = 0
    num_failures_total: int = 0
    num_in_flight: int = 0
    """Writes whose source the library may still read."""


class TransferEngine(Protocol):
    """Writes from registered local memory into memory that a peer has registered.

    The rule of a write that fails, times out or is cancelled:

    - **The destination is quarantined** by its owner (`Arena.quarantine`, `QUARANTINE_S`). Bytes
      may land there late, even seconds after the failure was reported, so handing the region to
      another request would corrupt it.
    - **The source stays pinned until `on_settled`**. A deadline ends our waiting, not the
      library's reading. Release source memory in `on_settled` and nowhere else: it is called
      exactly once whatever happens, before `write` returns when it succeeds, and after it has
      raised when the library is not done yet.

    An engine belongs to one process and one event loop.
    """

    @property
    def session_id(self) -> str:
        """How peers name this engine, e.g. `10.0.0.7:15428` or `[fd00::7]:15428`."""
        ...

    @property
    def stats(self) -> TransferStats: ...

    def register(self, address: int, nbytes: int) -> None:
        """Open `nbytes` of memory at `address` to peers' writes, and to ours as a source.

        Once per arena, at start; blocking (RDMA pins the pages). The memory must stay mapped
        until the engine is closed.

        Raises:
            TransferError: the range overlaps a registered one, or the library refuses it.
        """
        ...

    async def write(
        self,
        session_id: str,
        blocks: Sequence[Block],
        *,
        timeout_s: float,
        on_settled: OnSettled | None = None,
    ) -> None:
        """Copy `blocks` into the memory of the peer `session_id`; returns when all have arrived.

        Safe to cancel, under the rule above. The order in which bytes arrive is not defined.
        The caller checks destination addresses against what the peer offered: a peer refuses an
        address outside its registered ranges, but at the price of slowing the writes after it.

        Raises:
            TransferError: a source outside registered memory, a peer that refused, died or did
                not answer, or `timeout_s` ran out.
        """
        ...

    def close(self) -> None:
        """Take no more writes, from here or from peers. Does not wait for those in flight."""
        ...
