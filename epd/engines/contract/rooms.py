"""Bootstrap rooms: where a decode worker meets the prefill worker that holds its KV.

A room is named by the coordinator and used once. Either side may come first: decode asks for the
room while prefill may not even have heard of it. What happened to a room is remembered for a while
after its end, so that a late question gets the truth instead of a wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from epd.clock import Clock
from epd.errors import BadRequestError, DeadlineError, EPDError, WorkerError
from epd.types import Room
from epd.waiting import unless
from epd.wire import RoomDescriptor

_REMEMBER_S = 60.0
_MAX_REMEMBERED = 10_000


class RoomState(StrEnum):
    """EXPECTED: only decode has come. FAILED and CLOSED are final."""

    EXPECTED = "expected"
    PREFILLING = "prefilling"
    READY = "ready"
    SENDING = "sending"
    CLOSED = "closed"
    FAILED = "failed"


_NEXT: dict[RoomState, frozenset[RoomState]] = {
    RoomState.EXPECTED: frozenset({RoomState.PREFILLING, RoomState.FAILED}),
    RoomState.PREFILLING: frozenset({RoomState.READY, RoomState.FAILED}),
    RoomState.READY: frozenset({RoomState.SENDING, RoomState.FAILED}),
    RoomState.SENDING: frozenset({RoomState.CLOSED, RoomState.FAILED}),
    RoomState.CLOSED: frozenset(),
    RoomState.FAILED: frozenset(),
}
_OPEN = frozenset({RoomState.PREFILLING, RoomState.READY, RoomState.SENDING})


@dataclass(slots=True, eq=False)
class OpenRoom:
    """One hand-off from the prefill worker's side."""

    room: Room
    generation: int
    rid: str = ""
    state: RoomState = RoomState.EXPECTED
    descriptor: RoomDescriptor | None = None
    block_addresses: Sequence[int] = ()
    """Where the KV is in this worker's pool; the prefill handler owns the blocks."""
    error: EPDError | None = None
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the state is READY or final."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the state is final."""
    num_waiting: int = 0
    num_reading: int = 0
    """Writes whose library may still read the blocks."""
    on_unread: Callable[[], None] | None = None

    def move(self, to: RoomState) -> None:
        """Raises ValueError if the transition is illegal."""
        if to not in _NEXT[self.state]:
            raise ValueError(f"room {self.room} cannot go from {self.state} to {to}")
        self.state = to
        is_final = not _NEXT[to]
        if is_final or to is RoomState.READY:
            self.prefilled.set()
        if is_final:
            self.ended.set()

    def publish(self, descriptor: RoomDescriptor, block_addresses: Sequence[int]) -> None:
        """Prefill is done: decode may take over."""
        self.descriptor = descriptor
        self.block_addresses = block_addresses
        self.move(RoomState.READY)

    def fail(self, error: EPDError) -> None:
        """End the room with `error`, which decode will be told; no effect on an ended room."""
        if not self.ended.is_set():
            self.error = error
            self.move(RoomState.FAILED)

    def finish(self) -> None:
        """Decode has the KV; no effect on an ended room."""
        if not self.ended.is_set():
            self.move(RoomState.CLOSED)

    def begin_reading(self) -> None:
        self.num_reading += 1

    def end_reading(self) -> None:
        """The `on_settled` of a write of this room's blocks."""
        self.num_reading -= 1
        if not self.num_reading and self.on_unread is not None:
            self.on_unread()
            self.on_unread = None

    def when_unread(self, release: Callable[[], None]) -> None:
        """Call `release` once no write reads the blocks any more: now, or after the last."""
        if self.num_reading:
            self.on_unread = release
        else:
            release()

    async def unless_ended(self, work: Awaitable[None]) -> None:
        """Wait for `work`, but give it up when the room ends meanwhile.

        Raises:
            EPDError: of the work, or why the room ended.
        """
        await unless(self.ended.wait(), work)
        if self.error is not None:
            raise self.error

    async def wait_taken(self, timeout_s: float) -> None:
        """Return when decode has the KV.

        Raises:
            DeadlineError: decode did not come in `timeout_s`.
            EPDError: why the hand-off failed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        except TimeoutError:
            raise DeadlineError(f"no decode worker took the KV within {timeout_s:g} s") from None
        if self.error is not None:
            raise self.error


class RoomTable:
    """All rooms of a prefill worker, and those that ended lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rooms: dict[Room, OpenRoom] = {}
        self._ended: OrderedDict[Room, tuple[float, OpenRoom]] = OrderedDict()
        self._num_made = 0

    @property
    def num_open(self) -> int:
        """Rooms that hold or will hold memory."""
        return sum(room.state in _OPEN for room in self._rooms.values())

    def open(self, room: Room, rid: str) -> OpenRoom:
        """Prefill begins.

        Raises:
            BadRequestError: the room is or was in use; a room is never used twice.
        """
        self._forget_old()
        found = self._rooms.get(room)
        if room in self._ended or (found is not None and found.state is not RoomState.EXPECTED):
            raise BadRequestError(
                f"bootstrap_room {room} was used before", param="bootstrap_room", request_id=rid
            )
        entry = found or self._make(room)
        entry.rid = rid
        entry.move(RoomState.PREFILLING)
        return entry

    def close(self, entry: OpenRoom) -> None:
        """The prefill handler has let go; the outcome is remembered for latecomers."""
        entry.fail(WorkerError("the prefill worker gave the room up"))
        entry.block_addresses = ()
        self._rooms.pop(entry.room, None)
        self._ended[entry.room] = (self._clock.monotonic() + _REMEMBER_S, entry)

    async def wait_prefilled(self, room: Room, timeout_s: float) -> OpenRoom:
        """Return the room once its descriptor is there; the room may not be open yet.

        Raises:
            DeadlineError: not in `timeout_s`.
            EPDError: prefill failed, with the error its own client gets.
        """
        self._forget_old()
        if room in self._ended:
            entry = self._ended[room][1]
            raise entry.error or WorkerError(f"room {room} was taken already")
        entry = self._rooms.get(room) or self._make(room)
        entry.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await entry.prefilled.wait()
        except TimeoutError:
            raise DeadlineError(f"prefill did not finish within {timeout_s:g} s") from None
        finally:
            entry.num_waiting -= 1
            if entry.state is RoomState.EXPECTED and not entry.num_waiting:
                self._rooms.pop(room, None)
        if entry.error is not None:
            raise entry.error
        return entry

    def begin_send(self, room: Room, generation: int) -> OpenRoom:
        """Decode asks for the KV: READY → SENDING.

        Raises:
            EPDError: why the room failed, or that there is no such room to take.
        """
        entry = self._rooms.get(room)
        if entry is None or entry.generation != generation:
            ended = self._ended.get(room)
            if ended is not None and ended[1].generation == generation and ended[1].error:
                raise ended[1].error
            raise WorkerError(f"room {room} of generation {generation} is not open here")
        if entry.error is not None:
            raise entry.error
        if entry.state is not RoomState.READY:
            raise WorkerError(f"room {room} is {entry.state}: its KV cannot be taken")
        entry.move(RoomState.SENDING)
        return entry

    def _make(self, room: Room) -> OpenRoom:
        self._num_made += 1
        entry = self._rooms[room] = OpenRoom(room, generation=self._num_made)
        return entry

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        while self._ended:
            room, (until, _) = next(iter(self._ended.items()))
            if until > now and len(self._ended) <= _MAX_REMEMBERED:
                return
            del self._ended[room]
