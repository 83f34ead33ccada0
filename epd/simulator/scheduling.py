"""Who decides where a simulated request goes: the coordinator's own code, or something else.

The coordinator's decisions are not imitated: its `PairPlacement` and `EncodePlacement`, with their
policies, prefix index, joined duplicates and late binding, run here as they do in service, on
simulated time. This file only does what `attempts.py` and `encode_gateway.py` do around them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from random import Random
from typing import Protocol

from epd.config import RoutingConfig
from epd.coordinator.dispatch import Pair
from epd.coordinator.encode_part import Part
from epd.coordinator.encode_placement import EncodePlacement
from epd.coordinator.pair_placement import PairPlacement
from epd.pools.router import build_router
from epd.pools.routing import Place
from epd.simulator.fleet import Fleet
from epd.simulator.requests import MODEL_ID, SimRequest
from epd.simulator.servers import DecodeServer, EncodeServer, PrefillServer
from epd.types import Stage
from epd.wire import EncodeRequest, part_id


class Seat(Protocol):
    """The places of one request, given as it goes from stage to stage."""

    def encoding(self, index: int) -> AbstractAsyncContextManager[EncodeServer]:
        """Wait for a server for the image of that number; inside, it is at work on it."""
        ...

    def sent(self, index: int) -> None:
        """The prefill server has the image's embeddings."""
        ...

    async def prefill(self) -> PrefillServer:
        """The prefill server, when it may be used. Called when all images are encoded."""
        ...

    def prefilled(self) -> None:
        """The prompt is computed."""
        ...

    async def decode(self) -> DecodeServer:
        """The decode server, when it may be used."""
        ...

    def handed_over(self) -> None:
        """The decode server has the KV."""
        ...


class Scheduler(Protocol):
    """Places requests."""

    def seat(self, request: SimRequest) -> AbstractContextManager[Seat]:
        """The request comes; it has its answer when the block ends."""
        ...


class CoordinatorScheduler:
    """Places requests as the coordinator does.

    Args:
        fleet: the workers.
        config: the policies and what they weigh.
        random: draws lots.
    """

    def __init__(self, fleet: Fleet, config: RoutingConfig, random: Random) -> None:
        self.images = EncodePlacement(fleet.registry, build_router(Stage.ENCODE, config, random))
        self.pairs = PairPlacement(fleet.registry, self.images, config, random)
        self._fleet = fleet

    @contextmanager
    def seat(self, request: SimRequest) -> Generator[Seat]:
        """See `Scheduler`. What `Attempts` does for a first attempt."""
        placed = self.pairs.place(
            MODEL_ID, request.blocks, request.image_tokens, request.max_new_tokens
        )
        pair = placed.pair
        self.pairs.remember(pair.prefill, request.blocks)
        with pair.decode.carrying(placed.kv_tokens), ExitStack() as prefill_load:
            prefilling = prefill_load.enter_context(pair.prefill.carrying(placed.prefill_tokens))

            def hand_over() -> None:
                prefilling.is_done = True
                prefill_load.close()

            yield _CoordinatorSeat(self._fleet, self.images, request, pair, hand_over)


class _CoordinatorSeat:
    """See `Seat`."""

    def __init__(
        self,
        fleet: Fleet,
        placement: EncodePlacement,
        request: SimRequest,
        pair: Pair,
        hand_over: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._pair = pair
        self._hand_over = hand_over
        self._parts = [
            _part(request, index, pair.prefill.place) for index in range(len(request.images))
        ]

    @asynccontextmanager
    async def encoding(self, index: int) -> AsyncGenerator[EncodeServer]:
        """What `EncodeGateway` does for a part that no worker fails at."""
        part = self._parts[index]
        async with self._placement.turn(MODEL_ID, part):
            async with self._placement.at_work(MODEL_ID, part) as worker:
                yield self._fleet.encode.of(worker)
            self._placement.remember(MODEL_ID, part, worker)

    def sent(self, index: int) -> None:
        self._parts[index].sent()

    async def prefill(self) -> PrefillServer:
        return self._fleet.prefill.of(self._pair.prefill)

    def prefilled(self) -> None:
        """It still counts as this worker's: only the hand-over tells the coordinator."""

    async def decode(self) -> DecodeServer:
        return self._fleet.decode.of(self._pair.decode)

    def handed_over(self) -> None:
        self._hand_over()


def _part(request: SimRequest, index: int, receiver: Place) -> Part:
    image = request.images[index]
    part = Part(request.image_tokens, receiver, [])
    item = {"url": f"http://one-node/{image.content_hash}", "content_hash": image.content_hash}
    part.request = EncodeRequest(
        req_id=part_id(request.request_id, index),
        mm_items=[item],
        num_parts=len(request.images),
        part_idx=index,
    )
    return part
