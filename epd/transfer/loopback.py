"""An in-process transfer engine with faults on command, for tests of what uses the data plane.

Owns nothing but a table of engines; bytes are copied between addresses of this process, under
the same rules and through the same checks as the real library.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from epd.errors import TransferError
from epd.transfer.base import Block, OnSettled, TransferStats
from epd.transfer.writes import Flight, Writes


class FaultKind(Enum):
    """What goes wrong with a write."""

    FAIL = auto()
    """It fails at once; no byte arrives."""
    LAND_LATE = auto()
    """It fails at once, and its bytes arrive `seconds` later all the same."""
    DELAY = auto()
    """It takes `seconds`; if that passes the deadline, its bytes arrive after the failure."""
    HANG = auto()
    """It does nothing until `LoopbackNetwork.thaw`, then its bytes arrive."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    seconds: float = 0.0


class LoopbackNetwork:
    """The engines of one test, by session id, and the faults their next writes will meet."""

    def __init__(self) -> None:
        self._engines: dict[str, LoopbackEngine] = {}
        self._faults: deque[Fault] = deque()
        self._thawed = asyncio.Event()

    def engine(self, session_id: str) -> LoopbackEngine:
        """Start an engine; one of the same name replaces the old, as a restarted peer does."""
        engine = LoopbackEngine(self, session_id)
        self._engines[session_id] = engine
        return engine

    def inject(self, *faults: Fault) -> None:
        """Let the next writes, of any engine, meet these faults, one each."""
        self._faults.extend(faults)

    def thaw(self) -> None:
        """Let all writes that hang go on."""
        self._thawed.set()
        self._thawed = asyncio.Event()

    def next_fault(self) -> Fault | None:
        return self._faults.popleft() if self._faults else None

    async def wait_thawed(self) -> None:
        await self._thawed.wait()

    def deliver(self, session_id: str, pieces: Sequence[tuple[int, bytes]]) -> str | None:
        """Store `(destination, bytes)` pieces at a peer; None, or why it refused."""
        peer = self._engines.get(session_id)
        if peer is None or peer.writes.is_closed:
            return "the peer does not answer"
        try:
            for destination, content in pieces:
                peer.writes.ranges.check(destination, len(content))
        except TransferError as error:
            return f"the peer refused: {error}"
        for destination, content in pieces:
            ctypes.memmove(destination, content, len(content))
        return None


class LoopbackEngine:
    """One engine of a `LoopbackNetwork`. See `TransferEngine` for the contract."""

    def __init__(self, network: LoopbackNetwork, session_id: str) -> None:
        self._network = network
        self._session_id = session_id
        self._flights: set[asyncio.Task[str | None]] = set()
        self.writes = Writes()

    @property
    def session_id(self) -> str:
        return self._session_id

    @property
    def stats(self) -> TransferStats:
        return self.writes.stats

    def register(self, address: int, nbytes: int) -> None:
        self.writes.ranges.add(address, nbytes)

    async def write(
        self,
        session_id: str,
        blocks: Sequence[Block],
        *,
        timeout_s: float,
        on_settled: OnSettled | None = None,
    ) -> None:
        await self.writes.run(
            session_id,
            blocks,
            [partial(self._launch, session_id, blocks)],
            timeout_s=timeout_s,
            on_settled=on_settled,
        )

    def close(self) -> None:
        self.writes.is_closed = True

    async def _launch(self, session_id: str, blocks: Sequence[Block]) -> Flight:
        flight = asyncio.create_task(self._carry(session_id, blocks))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)
        return flight

    async def _carry(self, session_id: str, blocks: Sequence[Block]) -> str | None:
        fault = self._network.next_fault()
        match fault.kind if fault else None:
            case FaultKind.FAIL:
                return "injected fault"
            case FaultKind.LAND_LATE:
                assert fault is not None
                # Taken now: what lands late had already left this process.
                asyncio.get_running_loop().call_later(
                    fault.seconds, self._network.deliver, session_id, _read(blocks)
                )
                return "injected fault"
            case FaultKind.DELAY:
                assert fault is not None
                await asyncio.sleep(fault.seconds)
            case FaultKind.HANG:
                await self._network.wait_thawed()
            case None:
                await asyncio.sleep(0)
        return self._network.deliver(session_id, _read(blocks))


def _read(blocks: Sequence[Block]) -> list[tuple[int, bytes]]:
    return [(block.destination, ctypes.string_at(block.source, block.nbytes)) for block in blocks]
