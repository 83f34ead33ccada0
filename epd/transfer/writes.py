"""The half of `TransferEngine.write` that every engine shares.

Owns the registered ranges, the counters, and the rule of deadline and settling, so that the real
engine and the fake cannot differ in them. The engine supplies the legs: how bytes really move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from epd.errors import TransferError
from epd.transfer.base import Block, OnSettled, TransferStats

logger = logging.getLogger(__name__)

Flight = asyncio.Future[str | None]
"""What the library is carrying right now; done when it no longer reads the source, with None if
the bytes arrived and otherwise with what went wrong. Never cancelled by a writer."""

Leg = Callable[[], Awaitable[Flight]]
"""Starts the next part of a write. May wait for its turn, but not between start and return."""


class Writes:
    """The writes of one engine: which sources they may read, and how they end."""

    def __init__(self) -> None:
        self.ranges = RegisteredRanges()
        self.stats = TransferStats()
        self.is_closed = False

    def check(self, blocks: Sequence[Block]) -> None:
        """Raise `TransferError` unless the engine is open and every source is registered."""
        if self.is_closed:
            raise TransferError("the transfer engine is closed")
        for block in blocks:
            self.ranges.check(block.source, block.nbytes)

    async def run(
        self,
        session_id: str,
        blocks: Sequence[Block],
        legs: Iterable[Leg],
        *,
        timeout_s: float,
        on_settled: OnSettled | None,
    ) -> None:
        """Fly the legs in order. `legs` is consumed only after the blocks have been checked."""
        self.stats.num_in_flight += 1
        flight: Flight | None = None
        try:
            self.check(blocks)
            async with asyncio.timeout(timeout_s):
                for leg in legs:
                    flight = await leg()
                    # Shielded: what has been started runs to its end whatever becomes of us.
                    error = await asyncio.shield(flight)
                    if error is not None:
                        logger.warning("write to %s failed: %s", session_id, error)
                        raise TransferError(f"the write to the receiver failed: {error}")
        except TimeoutError:
            self.stats.num_failures_total += 1
            # The session is the peer's address: for the log, not for the client this may reach.
            logger.warning("write to %s not done in %g s", session_id, timeout_s)
            raise TransferError(
                f"the write to the receiver was not done in {timeout_s:g} s"
            ) from None
        except BaseException:
            self.stats.num_failures_total += 1
            raise
        else:
            self.stats.num_transfers_total += 1
            self.stats.bytes_moved_total += sum(block.nbytes for block in blocks)
        finally:
            if flight is None or flight.done():
                self._settle(on_settled)
            else:
                flight.add_done_callback(lambda _: self._settle(on_settled))

    def _settle(self, on_settled: OnSettled | None) -> None:
        self.stats.num_in_flight -= 1
        if on_settled is not None:
            on_settled()


class RegisteredRanges:
    """The memory an engine has registered; refuses what lies outside it."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, address: int, nbytes: int) -> None:
        """Remember a range; refuses an empty one and one that overlaps."""
        end = address + nbytes
        if address <= 0 or nbytes <= 0:
            raise TransferError(f"cannot register {nbytes} bytes at {address:#x}")
        if any(address < other_end and other < end for other, other_end in self._ranges):
            raise TransferError(f"memory at {address:#x} overlaps a registered range")
        self._ranges.append((address, end))

    def discard(self, address: int) -> None:
        self._ranges = [pair for pair in self._ranges if pair[0] != address]

    def addresses(self) -> list[int]:
        return [address for address, _ in self._ranges]

    def check(self, address: int, nbytes: int) -> None:
        """Raise `TransferError` unless the bytes lie inside one registered range."""
        if nbytes <= 0:
            raise TransferError(f"a block needs at least one byte, not {nbytes}")
        end = address + nbytes
        if not any(start <= address and end <= stop for start, stop in self._ranges):
            raise TransferError(f"{nbytes} bytes at {address:#x} are not in registered memory")
