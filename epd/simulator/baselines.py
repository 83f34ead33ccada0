"""Other systems' placement, as their documentation and code describe it, on the same fleet.

Each gets what its system has, and the servers' caches and batches, which are the same for all. In
two things they get better than they have: the turns of the round robin go on from request to
request (vLLM's began anew with each, vllm#52484), and hashing is by rendezvous, which spreads load
more evenly than a ring of virtual nodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Generic

from epd.config import RoutingConfig
from epd.pools.registry import Worker
from epd.pools.router import Router, build_router
from epd.pools.routing import Choice, LinkCosts, Snapshot, Work
from epd.pools.routing.affinity import preferred
from epd.simulator.fleet import Fleet, Pool, ServerT
from epd.simulator.requests import SimRequest
from epd.simulator.scheduling import CoordinatorScheduler, Scheduler, Seat
from epd.simulator.servers import DecodeServer, EncodeServer, PrefillServer
from epd.types import Stage


@dataclass(frozen=True, slots=True)
class Places:
    """All workers of one request, chosen before anything is done."""

    encode: Sequence[Worker]
    """One for each image."""
    prefill: Worker
    decode: Worker


class AtOnce:
    """Places the whole of a request when it comes, and hands it over without waiting.

    Args:
        fleet: the workers.
        choose: gives a request's places.
    """

    def __init__(self, fleet: Fleet, choose: Callable[[SimRequest], Places]) -> None:
        self._fleet = fleet
        self._choose = choose

    @contextmanager
    def seat(self, request: SimRequest) -> Generator[Seat]:
        yield _Placed(self._fleet, self._choose(request))


class _Placed:
    """See `Seat`: there is nothing to wait for."""

    def __init__(self, fleet: Fleet, places: Places) -> None:
        self._fleet = fleet
        self._places = places

    @asynccontextmanager
    async def encoding(self, index: int) -> AsyncGenerator[EncodeServer]:
        yield self._fleet.encode.of(self._places.encode[index])

    def sent(self, index: int) -> None:
        """Nobody counts."""

    async def prefill(self) -> PrefillServer:
        return self._fleet.prefill.of(self._places.prefill)

    def prefilled(self) -> None:
        """Nobody counts."""

    async def decode(self) -> DecodeServer:
        return self._fleet.decode.of(self._places.decode)

    def handed_over(self) -> None:
        """Nobody counts."""


def at_random(fleet: Fleet, random: Random) -> AtOnce:
    """SGLang: a request's images over the encoders in equal counts, shuffled; pairs by lot.

    Encoders as in SGLang 0.5.23, disaggregation/encoder/receiver.py; prefill and decode as its
    `mini_lb` chooses them.
    """
    pair = _pair_routers(RoutingConfig(prefill="random", decode="random"), random)

    def choose(request: SimRequest) -> Places:
        encoders = fleet.ready(Stage.ENCODE)
        random.shuffle(encoders)
        shares = [encoders[n % len(encoders)] for n in range(len(request.images))]
        return Places(shares, *_choose_pair(fleet, pair, request))

    return AtOnce(fleet, choose)


def in_turn(fleet: Fleet, random: Random) -> AtOnce:
    """vLLM: each image to the next encoder; here prefill and decode take turns too.

    Its example proxy (examples/online_serving/disaggregated_encoder/disagg_epd_proxy.py) draws
    prefill and decode by lot, which spreads them less evenly.
    """
    config = RoutingConfig(encode="round_robin", prefill="round_robin", decode="round_robin")
    encode = build_router(Stage.ENCODE, config, random)
    return AtOnce(fleet, _one_by_one(fleet, encode, _pair_routers(config, random)))


def by_hash(fleet: Fleet, random: Random) -> AtOnce:
    """SMG: consistent hashing of the content, whatever the load.

    Images go by their content, prompts by their first image, so that equal ones meet in caches;
    prompts without images, and decode, by the request, which spreads them.
    """

    def router() -> Router:
        return Router(_consistent_hash, LinkCosts(), random)

    return AtOnce(fleet, _one_by_one(fleet, router(), (router(), router())))


def _consistent_hash(snapshot: Snapshot) -> Choice:
    return Choice(preferred(snapshot.work.key, snapshot.candidates), "content hash")


def _one_by_one(
    fleet: Fleet, encode: Router, pair: tuple[Router, Router]
) -> Callable[[SimRequest], Places]:
    def choose(request: SimRequest) -> Places:
        encoders = [
            _choose(fleet, encode, Stage.ENCODE, image.num_tokens, image.content_hash)
            for image in request.images
        ]
        return Places(encoders, *_choose_pair(fleet, pair, request))

    return choose


def _pair_routers(config: RoutingConfig, random: Random) -> tuple[Router, Router]:
    prefill = build_router(Stage.PREFILL, config, random)
    return prefill, build_router(Stage.DECODE, config, random)


def _choose_pair(
    fleet: Fleet, routers: tuple[Router, Router], request: SimRequest
) -> tuple[Worker, Worker]:
    prefix = request.images[0].content_hash if request.images else request.request_id
    num_tokens = request.prompt.num_tokens
    prefill = _choose(fleet, routers[0], Stage.PREFILL, num_tokens, prefix)
    return prefill, _choose(fleet, routers[1], Stage.DECODE, num_tokens, request.request_id)


def _choose(fleet: Fleet, router: Router, stage: Stage, num_tokens: int, key: str) -> Worker:
    work = Work(num_tokens, key=key)
    worker, _ = router.choose(fleet.ready(stage), work, hits={}, hand_offs=())
    return worker


class CentralQueue(Generic[ServerT]):
    """One queue before all servers of a stage: its head goes to the first that is free.

    Args:
        pool: the servers.
        num_slots: requests that a server takes before it is no longer free.
    """

    def __init__(self, pool: Pool[ServerT], num_slots: int) -> None:
        self._num_free = dict.fromkeys(pool, num_slots)
        self._waiting: deque[asyncio.Future[ServerT]] = deque()

    async def enter(self) -> ServerT:
        """The server, once it is this caller's turn; of several that are free the emptiest."""
        if any(self._num_free.values()):
            server = max(self._num_free, key=lambda server: self._num_free[server])
            # To the end: among equals the turn goes round.
            self._num_free[server] = self._num_free.pop(server) - 1
            return server
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return await turn

    def leave(self, server: ServerT) -> None:
        """The server has room again."""
        if self._waiting:
            self._waiting.popleft().set_result(server)
        else:
            self._num_free[server] += 1


class CentralQueues:
    """EPDServe: first come, first served before every stage (arXiv 2501.05460, section 3.2).

    An encode server takes one image at a time and a prefill server one prompt, so that none queues
    behind another while a server is free; a decode server takes as many as its batch holds.
    """

    def __init__(self, fleet: Fleet, *, max_running_requests: int) -> None:
        self.encode = CentralQueue(fleet.encode, 1)
        self.prefill = CentralQueue(fleet.prefill, 1)
        self.decode = CentralQueue(fleet.decode, max_running_requests)

    @contextmanager
    def seat(self, request: SimRequest) -> Generator[Seat]:
        seat = _Queued(self)
        yield seat
        seat.leave_decode()


class _Queued:
    """See `Seat`."""

    def __init__(self, queues: CentralQueues) -> None:
        self._queues = queues
        self._prefill: PrefillServer | None = None
        self._decode: DecodeServer | None = None

    @asynccontextmanager
    async def encoding(self, index: int) -> AsyncGenerator[EncodeServer]:
        server = await self._queues.encode.enter()
        try:
            yield server
        finally:
            self._queues.encode.leave(server)

    def sent(self, index: int) -> None:
        """Encoding is over by then."""

    async def prefill(self) -> PrefillServer:
        self._prefill = await self._queues.prefill.enter()
        return self._prefill

    def prefilled(self) -> None:
        assert self._prefill is not None, "only a prompt that had a server is computed"
        self._queues.prefill.leave(self._prefill)

    async def decode(self) -> DecodeServer:
        self._decode = await self._queues.decode.enter()
        return self._decode

    def handed_over(self) -> None:
        """Prefill was left when the prompt was computed."""

    def leave_decode(self) -> None:
        if self._decode is not None:
            self._queues.decode.leave(self._decode)


def central_queues(fleet: Fleet, random: Random) -> CentralQueues:
    return CentralQueues(fleet, max_running_requests=fleet.profile.decode.max_running_requests)


def ours(fleet: Fleet, random: Random) -> CoordinatorScheduler:
    """The coordinator with the defaults of its configuration."""
    return CoordinatorScheduler(fleet, RoutingConfig(), random)


SYSTEMS: Mapping[str, Callable[[Fleet, Random], Scheduler]] = {
    "epd": ours,
    "random": at_random,
    "round_robin": in_turn,
    "hash": by_hash,
    "fcfs": central_queues,
}
"""How to make each scheduler that is compared, by name."""
