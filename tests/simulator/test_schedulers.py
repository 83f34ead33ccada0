from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from epd.clock import FakeClock
from epd.config import RoutingConfig
from epd.pools.routing import POLICIES, Policy, Snapshot
from epd.simulator.baselines import (
    SYSTEMS,
    CentralQueue,
    CentralQueues,
    at_random,
    by_hash,
    in_turn,
)
from epd.simulator.fleet import Fleet, Split
from epd.simulator.loop import run_simulated
from epd.simulator.requests import SimRequest
from epd.simulator.run import simulate
from epd.simulator.scheduling import Scheduler
from epd.types import Stage
from tests.simulator.requests import PROFILE, ask, image

Places = tuple[list[int], int, int]
"""Numbers of the encode servers, by image, of the prefill server and of the decode server."""


def places(
    build: Callable[[Fleet, Random], Scheduler], requests: list[SimRequest], split: Split
) -> list[Places]:
    """Where each request goes if none is ever done before the next comes."""

    async def main(clock: FakeClock) -> list[Places]:
        fleet = Fleet(split, PROFILE, clock, seed=0)
        encode, prefill, decode = list(fleet.encode), list(fleet.prefill), list(fleet.decode)
        scheduler = build(fleet, Random(0))
        found: list[Places] = []
        for request in requests:
            with scheduler.seat(request) as seat:
                encoders: list[int] = []
                for index in range(len(request.images)):
                    async with seat.encoding(index) as server:
                        encoders.append(encode.index(server))
                found.append(
                    (
                        encoders,
                        prefill.index(await seat.prefill()),
                        decode.index(await seat.decode()),
                    )
                )
        await fleet.close()
        return found

    return run_simulated(main)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(Stage.ENCODE, "affinity"), (Stage.PREFILL, "prefix"), (Stage.DECODE, "kv_headroom")],
)
def test_ours_asks_the_policies_of_the_coordinator(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Snapshot] = []
    build = POLICIES[stage][name]

    def build_spy(config: RoutingConfig) -> Policy:
        policy = build(config)
        return lambda snapshot: (asked.append(snapshot), policy(snapshot))[1]

    monkeypatch.setitem(POLICIES[stage], name, build_spy)  # type: ignore[arg-type]
    requests = [ask(0, image(1), image(2)), ask(1), ask(2, image(1), arrival_s=1)]
    simulate(requests, SYSTEMS["epd"], split=Split(2, 2, 2), profile=PROFILE)
    assert len(asked) == 3
    assert all(len(snapshot.candidates) == 2 for snapshot in asked)
    if stage is not Stage.DECODE:
        assert asked[2].work.num_tokens >= 100
        assert max(candidate.hit_tokens for candidate in asked[2].candidates) > 0


def test_random_gives_encoders_equal_counts_of_a_request_and_draws_the_rest() -> None:
    requests = [ask(n, *(image(10 * n + k) for k in range(5))) for n in range(60)]
    found = places(at_random, requests, Split(2, 3, 2))
    for encoders, _, _ in found:
        assert sorted(Counter(encoders).values()) == [2, 3]
    firsts = Counter(encoders[0] for encoders, _, _ in found)
    assert min(firsts.values()) > 15
    assert Counter(prefill for _, prefill, _ in found).keys() == {0, 1, 2}
    turns = [(prefill, decode) for _, prefill, decode in found]
    assert len(set(turns)) == 6, "prefill and decode are drawn apart"


def test_round_robin_goes_on_from_request_to_request() -> None:
    requests = [ask(n, image(n)) for n in range(6)]
    found = places(in_turn, requests, Split(3, 2, 1))
    assert found == [([n % 3], n % 2, 0) for n in range(6)]


def test_hashing_keeps_content_together_whatever_the_load() -> None:
    pictures = [image(n) for n in range(40)]
    found = places(by_hash, [ask(n, pictures[n % 40]) for n in range(80)], Split(3, 3, 1))
    assert [place[:2] for place in found[:40]] == [place[:2] for place in found[40:]]
    assert Counter(place[0][0] for place in found).keys() == {0, 1, 2}
    hot = places(by_hash, [ask(n, pictures[0]) for n in range(20)], Split(3, 3, 2))
    assert len({(encoders[0], prefill) for encoders, prefill, _ in hot}) == 1
    assert {decode for _, _, decode in hot} == {0, 1}, "decode is by request"


def test_a_central_queue_gives_its_head_to_the_first_that_is_free() -> None:
    async def main(clock: FakeClock) -> None:
        fleet = Fleet(Split(2, 1, 1), PROFILE, clock, seed=0)
        queue = CentralQueue(fleet.encode, 1)
        first, second = await queue.enter(), await queue.enter()
        assert first is not second
        order: list[str] = []

        async def wait(name: str) -> None:
            server = await queue.enter()
            order.append(name)
            assert server is second

        waiting = [asyncio.create_task(wait(name)) for name in ("a", "b")]
        await asyncio.sleep(1)
        assert not order
        for _ in waiting:
            queue.leave(second)
            await asyncio.sleep(0.1)
        assert order == ["a", "b"]
        queue.leave(first)
        assert await queue.enter() is first

    run_simulated(main)


def test_a_central_queue_fills_the_emptiest_first() -> None:
    async def main(clock: FakeClock) -> None:
        fleet = Fleet(Split(1, 1, 3), PROFILE, clock, seed=0)
        queue = CentralQueue(fleet.decode, 2)
        taken = [await queue.enter() for _ in range(6)]
        assert Counter(map(id, taken[:3])) == Counter(map(id, fleet.decode))
        assert Counter(map(id, taken[3:])) == Counter(map(id, fleet.decode))

    run_simulated(main)


def test_fcfs_prefills_in_the_order_in_which_images_are_ready() -> None:
    """The first to come has the longest image; nobody waits behind it at an idle server."""
    requests = [ask(0, image(1, 1200)), ask(1, image(2, 100)), ask(2, image(3, 100))]
    run = simulate(
        requests,
        lambda fleet, _: CentralQueues(fleet, max_running_requests=8),
        split=Split(2, 1, 1),
        profile=PROFILE,
    )
    firsts = sorted(run.served, key=lambda served: served.first_token_s)
    assert [served.request.request_id for served in firsts] == ["r1", "r2", "r0"]
