"""Image parts at the encode worker: encoded, held for the prefill worker under a lease, sent.

A part that is held keeps its images in the store if there is room (see `embedding_store.py`).

A part is named by its req_id (see `epd.wire.part_id`). Calls about it may come in any order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from epd.engines.torch.embedding_store import EmbeddingStore
from epd.engines.torch.image_source import ImageReference
from epd.errors import BadRequestError, DeadlineError, EPDError, WorkerError
from epd.wire import EncodeResponse, rid_of


class PartState(StrEnum):
    """EXPECTED: somebody asked for it before its `/encode` came. GONE is final."""

    EXPECTED = "expected"
    ENCODING = "encoding"
    READY = "ready"
    SENDING = "sending"
    GONE = "gone"


_NEXT: dict[PartState, frozenset[PartState]] = {
    PartState.EXPECTED: frozenset({PartState.ENCODING, PartState.GONE}),
    PartState.ENCODING: frozenset({PartState.READY, PartState.GONE}),
    PartState.READY: frozenset({PartState.SENDING, PartState.GONE}),
    # A failed write leaves the part to be sent again, until its lease ends.
    PartState.SENDING: frozenset({PartState.READY, PartState.GONE}),
    PartState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class Part:
    req_id: str
    state: PartState = PartState.EXPECTED
    images: Sequence[ImageReference] = ()
    held: list[str] = field(default_factory=list[str])
    """Keys of the images that are held in the store for this part."""
    response: EncodeResponse | None = None
    error: EPDError | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `response` or `error` is."""
    num_waiting: int = 0
    lease: asyncio.TimerHandle | None = None

    def move(self, to: PartState) -> None:
        """Raises ValueError if the transition is illegal."""
        if to not in _NEXT[self.state]:
            raise ValueError(f"part {self.req_id} cannot go from {self.state} to {to}")
        self.state = to


class PartTable:
    """All parts that are not gone, and what they hold in the store."""

    def __init__(self, store: EmbeddingStore, *, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._parts: dict[str, Part] = {}

    @property
    def num_encoding(self) -> int:
        return sum(part.state is PartState.ENCODING for part in self._parts.values())

    def open(self, req_id: str, images: Sequence[ImageReference]) -> Part:
        """Encoding begins.

        Raises:
            BadRequestError: the part is there already.
        """
        part = self._parts.get(req_id)
        if part is not None and part.state is not PartState.EXPECTED:
            raise BadRequestError(f"part {req_id} is {part.state} already", param="req_id")
        part = part or self._make(req_id)
        part.images = images
        part.move(PartState.ENCODING)
        return part

    def hold(self, part: Part, key: str) -> None:
        """One of the part's images is encoded. No effect on a part that is gone."""
        if part.state is not PartState.GONE:
            part.held.append(key)
            self._store.hold(key)

    def publish(self, part: Part, response: EncodeResponse) -> None:
        """The part is encoded and held for whoever sends for it, until its lease ends."""
        part.move(PartState.READY)
        part.response = response
        part.settled.set()
        self._renew(part)

    async def wait_encoded(self, req_id: str, timeout_s: float) -> EncodeResponse:
        """The part's sizes, once it is encoded; its `/encode` may not even have come.

        Raises:
            DeadlineError: not in `timeout_s`.
            EPDError: why it could not be encoded.
        """
        part = self._parts.get(req_id) or self._make(req_id)
        part.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await part.settled.wait()
        except TimeoutError:
            raise DeadlineError(f"part {req_id} was not encoded within {timeout_s:g} s") from None
        finally:
            part.num_waiting -= 1
            if part.state is PartState.EXPECTED and not part.num_waiting:
                self.remove(part, WorkerError("nobody waits for the part any more"))
        if part.response is None:
            raise part.error or WorkerError(f"part {req_id} is gone")
        return part.response

    def begin_send(self, req_id: str) -> Part:
        """READY → SENDING; the lease rests meanwhile.

        Raises:
            WorkerError: there is no such part to send.
        """
        part = self._parts.get(req_id)
        if part is None or part.state is not PartState.READY:
            state = "not here" if part is None else part.state
            raise WorkerError(f"part {req_id} is {state}: it cannot be sent")
        part.move(PartState.SENDING)
        self._stop_lease(part)
        return part

    def send_again(self, part: Part) -> None:
        """The write failed: hold the part for another try."""
        if part.state is PartState.SENDING:
            part.move(PartState.READY)
            self._renew(part)

    def remove(self, part: Part, error: EPDError | None = None) -> None:
        """The part was sent, failed, or was given up. No effect on one that is gone."""
        if part.state is PartState.GONE:
            return
        part.move(PartState.GONE)
        self._stop_lease(part)
        del self._parts[part.req_id]
        part.error = error
        part.settled.set()
        for key in part.held:
            self._store.let_go(key)

    def remove_request(self, rid: str) -> None:
        """Give up all parts of a request."""
        for part in [p for p in self._parts.values() if rid_of(p.req_id) == rid]:
            self.remove(part, WorkerError("the request was aborted"))

    def close(self) -> None:
        for part in list(self._parts.values()):
            self.remove(part, WorkerError("the worker stops"))

    def _make(self, req_id: str) -> Part:
        part = self._parts[req_id] = Part(req_id)
        return part

    def _renew(self, part: Part) -> None:
        self._stop_lease(part)
        loop = asyncio.get_running_loop()
        part.lease = loop.call_later(
            self._lease_s, self.remove, part, DeadlineError("nobody sent for the part in time")
        )

    def _stop_lease(self, part: Part) -> None:
        if part.lease is not None:
            part.lease.cancel()
            part.lease = None
