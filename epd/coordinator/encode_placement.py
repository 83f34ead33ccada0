"""Which encode worker gets a part, and when: content affinity, joined duplicates, late binding.

- The policy chooses among the workers that have room, and those that have encoded the image before:
  these need none, as they still have the embeddings.
- While an image is being encoded, other parts with the same image wait: it is encoded once.
- A worker is given no more parts at once than it works on. What is over that waits here and goes to
  whichever worker is free first, so that none idles while another has a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from epd.coordinator.encode_part import UNCOUNTED_TOKENS, Part
from epd.coordinator.lifecycle import Placement
from epd.errors import NoWorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.router import Router
from epd.pools.routing import Choice, HandOff, Place, Work
from epd.types import Stage

_MAX_REMEMBERED = 65_536
_MAX_HOLDERS = 4
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
        router: chooses among workers that are free.
    """

    def __init__(self, registry: Registry, router: Router) -> None:
        self.num_placed = 0
        self.num_repeats = 0
        """Of those placed, the parts that went to a worker because it had encoded them before."""
        self._registry = registry
        self._router = router
        self._busy: dict[Worker, int] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._holders: OrderedDict[tuple[str, Key], tuple[Worker, ...]] = OrderedDict()
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
        worker, choice = await self._free_worker(model_id, part)
        hit_tokens = choice.candidate.hit_tokens
        self._busy[worker] = self._busy.get(worker, 0) + 1
        self.num_placed += 1
        self.num_repeats += hit_tokens > 0
        part.place(worker, part.num_tokens - hit_tokens)
        part.placements.append(Placement(Stage.ENCODE, worker.worker_id, choice.reason))
        try:
            yield worker
        finally:
            self._busy[worker] -= 1
            if not self._busy[worker]:
                del self._busy[worker]
            self._wake_one()

    def has_others(self, model_id: str, part: Part, worker: Worker) -> bool:
        """Whether a worker other than `worker` could encode `part` if that one fails."""
        ready = self._registry.ready(Stage.ENCODE, model_id)
        return not part.failed.union([worker]).issuperset(ready)

    def remember(self, model_id: str, part: Part, worker: Worker) -> None:
        """`worker` has the part's embeddings from now on."""
        if part.key:
            key = (model_id, part.key)
            others = [w for w in self._holders.get(key, ()) if w is not worker]
            live = [w for w in others if not w.lost.is_set()]
            self._holders[key] = (worker, *live)[:_MAX_HOLDERS]
            self._holders.move_to_end(key)
            if len(self._holders) > _MAX_REMEMBERED:
                self._holders.popitem(last=False)

    def hand_offs(self, model_id: str, image_tokens: Mapping[str, int]) -> list[HandOff]:
        """Where embeddings of images may come from: who has them cached, or any encode worker."""
        if not image_tokens:
            return []
        ready = self._registry.ready(Stage.ENCODE, model_id)
        anywhere = frozenset(worker.place for worker in ready)
        tokens: dict[frozenset[Place], int] = {}
        for content_hash, num_tokens in image_tokens.items():
            holders = self._holders.get((model_id, (content_hash,)), ())
            places = frozenset(worker.place for worker in holders if worker in ready) or anywhere
            tokens[places] = tokens.get(places, 0) + num_tokens
        return [HandOff(num_tokens, places) for places, num_tokens in tokens.items()]

    def uncached_tokens(self, model_id: str, image_tokens: Mapping[str, int]) -> int:
        """Image tokens, by content hash, of those images that no live worker has encoded."""
        return sum(
            num_tokens or UNCOUNTED_TOKENS
            for content_hash, num_tokens in image_tokens.items()
            if all(w.lost.is_set() for w in self._holders.get((model_id, (content_hash,)), ()))
        )

    async def _free_worker(self, model_id: str, part: Part) -> tuple[Worker, Choice]:
        is_first_look = True
        while True:
            ready = self._registry.ready(Stage.ENCODE, model_id)
            usable = [worker for worker in ready if worker not in part.failed]
            if not usable:
                raise NoWorkerError("every encode worker that is ready failed at this image")
            holders = self._holders.get((model_id, part.key), ())
            # Who has waited is served before who comes now.
            is_its_turn = not (is_first_look and self._waiting)
            found = [w for w in usable if w in holders or (is_its_turn and self._has_room(w))]
            if found:
                return self._choose(found, holders, part)
            await self._wait(is_new=is_first_look)
            is_first_look = False

    def _choose(
        self, workers: list[Worker], holders: tuple[Worker, ...], part: Part
    ) -> tuple[Worker, Choice]:
        return self._router.choose(
            workers,
            Work(part.num_tokens, key=part.affinity_key),
            hits={worker.worker_id: part.num_tokens for worker in holders},
            hand_offs=[HandOff(part.num_tokens, frozenset({part.receiver}))],
        )

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
