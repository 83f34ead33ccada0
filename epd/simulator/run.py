"""Runs requests through a fleet in simulated time, each from its arrival to its last token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from epd.clock import Clock, FakeClock
from epd.engines.sim.profile import Profile
from epd.simulator.fleet import Fleet, Split
from epd.simulator.loop import run_simulated
from epd.simulator.requests import SimRequest
from epd.simulator.scheduling import Scheduler, Seat
from epd.simulator.servers import EncodeServer

_HORIZON_S = 1e6


@dataclass(frozen=True, slots=True)
class Served:
    """When things happened to a request, in simulated seconds."""

    request: SimRequest
    arrival_s: float
    first_token_s: float
    end_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for an answer of one."""
        return (self.end_s - self.first_token_s) / max(1, self.request.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run."""

    served: tuple[Served, ...]
    """In the order of their ends."""
    span_s: float
    """From the start to the last arrival."""
    num_encodes: int
    """Images that went through a vision tower."""
    encode_busy_s: tuple[float, ...]
    """By worker."""
    prefill_busy_s: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_prompt_tokens: int


def simulate(
    requests: Sequence[SimRequest],
    build_scheduler: Callable[[Fleet, Random], Scheduler],
    *,
    split: Split,
    profile: Profile,
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> Run:
    """Serve all requests to their ends.

    Args:
        requests: by arrival; they come `rate_per_s` times as fast as they say.
        build_scheduler: makes what places them.
        split: workers by stage.
        profile: how fast these are.
        rate_per_s: how much faster than they say requests arrive.
        seed: of the scheduler's lots and the servers' jitter.
    """

    async def main(clock: FakeClock) -> Run:
        fleet = Fleet(split, profile, clock, seed)
        scheduler = build_scheduler(fleet, Random(f"{seed} scheduler"))
        served: list[Served] = []

        async def one(request: SimRequest) -> None:
            arrival_s = clock.monotonic()
            with scheduler.seat(request) as seat:
                first_token_s = await _serve(request, seat, clock)
            served.append(Served(request, arrival_s, first_token_s, clock.monotonic()))

        heart = asyncio.create_task(fleet.beat())
        async with asyncio.timeout(_HORIZON_S), asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(request.arrival_s / rate_per_s - clock.monotonic())
                group.create_task(one(request))
            span_s = clock.monotonic()
        heart.cancel()
        assert fleet.is_idle, "a server still holds something of a request that has ended"
        await fleet.close()
        return _run(fleet, served, span_s)

    return run_simulated(main)


async def _serve(request: SimRequest, seat: Seat, clock: Clock) -> float:
    """From the arrival to the end of the answer; returns when the first token was there."""

    async def encode(index: int) -> EncodeServer:
        async with seat.encoding(index) as server:
            await server.encode(request.images[index])
        return server

    async def fetch(index: int, holder: EncodeServer) -> None:
        await holder.send(request.images[index])
        seat.sent(index)

    holders = await asyncio.gather(*(encode(index) for index in range(len(request.images))))
    prefill = await seat.prefill()
    await asyncio.gather(*(fetch(index, holder) for index, holder in enumerate(holders)))
    prompt_kv = await prefill.prefill(request)
    seat.prefilled()
    decode = await seat.decode()
    kv = await decode.reserve(request)
    await prefill.send(request)
    prefill.release(prompt_kv)
    seat.handed_over()
    first_token_s = clock.monotonic()
    await decode.generate(request)
    decode.release(kv)
    return first_token_s


def _run(fleet: Fleet, served: list[Served], span_s: float) -> Run:
    return Run(
        tuple(served),
        span_s,
        sum(server.num_encodes for server in fleet.encode),
        tuple(server.busy_s for server in fleet.encode),
        tuple(server.busy_s for server in fleet.prefill),
        sum(server.num_prompt_tokens for server in fleet.prefill),
        sum(server.num_cached_tokens for server in fleet.prefill),
    )
