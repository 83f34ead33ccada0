"""Which encode worker gets a part, and when: content affinity, joined duplicates, late binding.

- An image that a worker has encoded goes to that worker again, which still has the embeddings.
- While an image is being encoded, other parts with the same image wait: it is encoded once.
- A worker is given no more parts at once than it works on. What is over that waits here and goes to
  whichever worker is free first, so that none idles while another has a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from epd.coordinator.encode_part import Part
from epd.errors import NoWorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.routing import Policy
from epd.types import Stage

_MAX_REMEMBERED = 65_536
_LOOK_AGAIN_S = 0.5

Key = tuple[str, ...]


@dataclass(slots=True)
class _Turn:
    """Parts with the same images, of which one at a time is encoded."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class EncodePlacement:
    """The places of all parts being encoded.

    Args:
        registry: the encode workers.
        policy: chooses among workers that are free.
    """

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self.num_placed = 0
        self.num_repeats = 0
        """Of those placed, the parts that went to a worker because it had encoded them before."""
        self._registry = registry
        self._policy = policy
        self._busy: dict[Worker, int] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._homes: OrderedDict[tuple[str, Key], Worker] = OrderedDict()
        self._turns: dict[tuple[str, Key], _Turn] = {}

    @property
    def num_waiting(self) -> int:
        """Parts that wait for a free worker."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, model_id: str, part: Part) -> AsyncGenerator[None]:
        """Wait until no other part with the same images is being encoded; inside, this one is."""
        key = (model_id, part.key)
        if not part.key:
            yield  # images without a hash are all different
            return
        turn = self._turns.setdefault(key, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[key]

    @contextlib.asynccontextmanager
    async def at_work(self, model_id: str, part: Part) -> AsyncGenerator[Worker]:
        """Place `part`; inside, its worker encodes it.

        Raises:
            NoWorkerError: no worker is ready that has not failed at this part.
        """
        worker = await self._free_worker(model_id, part)
        self._busy[worker] = self._busy.get(worker, 0) + 1
        self.num_placed += 1
        part.place(worker)
        try:
            yield worker
        finally:
            self._busy[worker] -= 1
            if not self._busy[worker]:
                del self._busy[worker]
            self._wake_one()

    def remember(self, model_id: str, part: Part, worker: Worker) -> None:
        """`worker` has the part's embeddings from now on."""
        if part.key:
            self._homes[model_id, part.key] = worker
            self._homes.move_to_end((model_id, part.key))
            if len(self._homes) > _MAX_REMEMBERED:
                self._homes.popitem(last=False)

    async def _free_worker(self, model_id: str, part: Part) -> Worker:
        is_first_look = True
        while True:
            ready = self._registry.ready(Stage.ENCODE, model_id)
            usable = [worker for worker in ready if worker not in part.failed]
            if not usable:
                raise NoWorkerError("every encode worker that is ready failed at this image")
            home = self._homes.get((model_id, part.key))
            if home is not None and home in usable:
                # Whatever it is busy with: finding the embeddings costs it next to nothing.
                self.num_repeats += 1
                return home
            free = [worker for worker in usable if self._has_room(worker)]
            # Who has waited is served before who comes now.
            if free and not (is_first_look and self._waiting):
                chosen = self._policy([worker.candidate for worker in free])
                return next(worker for worker in free if worker.worker_id == chosen.worker_id)
            await self._wait(is_new=is_first_look)
            is_first_look = False

    def _has_room(self, worker: Worker) -> bool:
        return self._busy.get(worker, 0) < worker.report.encode_window

    async def _wait(self, *, is_new: bool) -> None:
        """Until a worker may have become free. Workers come and go too, so not for long."""
        turn = asyncio.get_running_loop().create_future()
        if is_new:
            self._waiting.append(turn)
        else:
            self._waiting.appendleft(turn)  # It has waited before, and keeps its place.
        try:
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await turn
        except TimeoutError:
            pass
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _wake_one(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
