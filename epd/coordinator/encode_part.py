"""One image part of a request in flight: which encode worker has it, and what must follow it there.

A part is placed on a worker, perhaps taken from it when the worker fails, placed again, and at the
end sent. Calls about the part wait for a placement and go where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from epd.coordinator.lifecycle import Placement
from epd.errors import EPDError, WorkerError
from epd.pools.registry import Worker
from epd.pools.routing import Place
from epd.waiting import unless
from epd.wire import EncodeRequest

T = TypeVar("T")

UNCOUNTED_TOKENS = 256
"""Guessed of images whose tokens are not known."""


class Part:
    """Where one part is.

    Args:
        tokens_by_hash: image tokens of the request's images, by content hash.
        receiver: where the prefill worker is that takes the embeddings.
        placements: the request's, for its timeline.
    """

    def __init__(
        self, tokens_by_hash: dict[str, int], receiver: Place, placements: list[Placement]
    ) -> None:
        self.receiver = receiver
        self.placements = placements
        self.request: EncodeRequest | None = None
        """The prefill worker's `/encode`; None until it came."""
        self.body = b""
        """The same, as it came, for each worker the part is placed on."""
        self.failed: set[Worker] = set()
        """Workers that failed at this part; it is not placed there again."""
        self.receivers: list[bytes] = []
        """`/scheduler_receive_url` calls that a worker has taken; a new one must hear them too."""
        self.encoding: asyncio.Task[object] | None = None
        """The one task that places the part and has it encoded."""
        self.is_pushed = False
        """Whether its worker pushes it to receivers that make themselves known."""
        self.is_sent = False
        self._tokens_by_hash = tokens_by_hash
        self._last: Worker | None = None
        self._load = ExitStack()
        self._placed: asyncio.Future[Worker] = _future()
        self._taken = asyncio.Event()

    @property
    def key(self) -> tuple[str, ...]:
        """The content of the part's images, in order: equal keys give equal embeddings."""
        assert self.request is not None, "only a part that was asked for has content"
        return self.request.content_hashes

    @property
    def affinity_key(self) -> str:
        """What sends equal images to one worker; images without a hash are all different."""
        assert self.request is not None, "only a part that was asked for has content"
        return " ".join(self.key) or self.request.req_id

    @property
    def num_tokens(self) -> int:
        """Image tokens of the part; a guess for images of a family that EPD cannot count."""
        counted = sum(self._tokens_by_hash.get(content_hash, 0) for content_hash in self.key)
        return counted or UNCOUNTED_TOKENS

    @property
    def num_images(self) -> int:
        """Images of the part."""
        assert self.request is not None, "only a part that was asked for has content"
        return len(self.request.mm_items)

    @property
    def worker(self) -> Worker | None:
        """Where the part is now."""
        is_placed = self._placed.done() and not self._placed.cancelled()
        return None if not is_placed or self._placed.exception() else self._placed.result()

    @property
    def holders(self) -> set[Worker]:
        """Live workers that may hold, or still compute, what nobody will take."""
        last = set[Worker]() if self.is_sent or self._last is None else {self._last}
        return {worker for worker in self.failed | last if not worker.lost.is_set()}

    def place(self, worker: Worker, num_tokens: int) -> None:
        """The part is given to `worker`, and weighs on it until it is sent or taken away.

        Args:
            worker: who gets it.
            num_tokens: image tokens that `worker` must encode for it.
        """
        if self._placed.done():
            self._placed = _future()
        self._load.close()
        self._load.enter_context(worker.carrying(num_tokens))
        self._placed.set_result(worker)
        self._taken = asyncio.Event()
        self._last = worker

    def take_from(self, worker: Worker) -> None:
        """`worker` failed: calls about the part wait for another placement."""
        self.failed.add(worker)
        if self.worker is worker:
            self._load.close()
            self._placed = _future()
            self._taken.set()

    async def settled_at(self, worker: Worker) -> bool:
        """Wait until the part is encoded, or taken from `worker`; whether it is still there.

        A call about the part failed at `worker`, which may fail at the part too, or not.
        """
        if self.worker is worker and self.encoding is not None:
            await unless(self._taken.wait(), asyncio.wait([self.encoding]))
        return self.worker is worker

    async def unless_taken(self, worker: Worker, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of a call to `worker`, or None if the part is taken from it before.

        One that hangs would else keep a call about a part that is encoded elsewhere by now.
        """
        if self.worker is not worker:
            work.close()
            return None
        return await unless(self._taken.wait(), work)

    def sent(self) -> None:
        """The receiver has the part's embeddings."""
        self.is_sent = True
        self._load.close()

    def give_up(self, error: EPDError) -> None:
        """The part cannot be placed: calls that wait, and those that come, get `error`."""
        self._load.close()
        self._taken.set()
        if self._placed.done():
            self._placed = _future()
        self._placed.set_exception(error)
        self._placed.exception()  # seen, even if nobody waits for the placement

    def close(self) -> None:
        """The request has ended."""
        if self.encoding is not None:
            self.encoding.cancel()
        self._load.close()
        self._placed.cancel()  # nobody waits any more; no effect on a placed part

    async def where(self) -> Worker:
        """The worker that has the part, once it is placed.

        Raises:
            WorkerError: the request ended before.
            EPDError: the part could not be placed.
        """
        placed = self._placed
        try:
            # Shielded: a caller that gives up must not cancel the placement for the others.
            return await asyncio.shield(placed)
        except asyncio.CancelledError:
            if placed.cancelled():
                raise WorkerError("the request ended before the part was placed") from None
            raise


def _future() -> asyncio.Future[Worker]:
    return asyncio.get_running_loop().create_future()
