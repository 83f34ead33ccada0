"""From live workers to a policy's snapshot, and from its choice back to a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

from epd.config import RoutingConfig
from epd.pools.registry import Worker
from epd.pools.routing import (
    Candidate,
    Choice,
    HandOff,
    LinkCosts,
    Policy,
    Snapshot,
    Work,
    policy_of,
    total_cost,
)
from epd.types import Stage, WorkerId


class Router:
    """Places the work of one stage.

    Args:
        policy: chooses.
        links: what a hand-off costs between two places.
        random: draws the lots of a policy that uses them.
    """

    def __init__(self, policy: Policy, links: LinkCosts, random: Random) -> None:
        self._policy = policy
        # Few places, and asked about for every candidate of every choice.
        self._nearest = lru_cache(maxsize=4096)(links.nearest)
        self._random = random
        self._turn = 0

    def choose(
        self,
        workers: Sequence[Worker],
        work: Work,
        *,
        hits: Mapping[WorkerId, int],
        hand_offs: Sequence[HandOff],
    ) -> tuple[Worker, Choice]:
        """The worker that gets `work`, and why.

        Args:
            workers: at least one.
            work: what is to be done.
            hits: tokens of it that workers have in their caches.
            hand_offs: what its worker will receive and send.
        """
        places = {worker.place for worker in workers}
        links = {place: total_cost(place, hand_offs, self._nearest) for place in places}
        candidates = tuple(
            _candidate(worker, hits.get(worker.worker_id, 0), links[worker.place])
            for worker in workers
        )
        choice = self._policy(Snapshot(work, candidates, self._random.random()))
        chosen = workers[candidates.index(choice.candidate)]
        self._turn += 1
        chosen.last_turn = self._turn
        return chosen, choice


def build_router(stage: Stage, config: RoutingConfig, random: Random) -> Router:
    """The router of a stage, as the configuration says."""
    links = LinkCosts(**config.link.model_dump())
    return Router(policy_of(stage, config), links, random)


def _candidate(worker: Worker, hit_tokens: int, link_tokens: float) -> Candidate:
    load = worker.report.load
    return Candidate(
        worker.worker_id,
        worker.num_in_flight,
        worker.tokens_in_flight,
        worker.last_turn,
        hit_tokens,
        link_tokens,
        load.num_running_reqs + load.num_waiting_reqs,
        load.num_used_tokens,
        load.max_total_num_tokens,
        worker.done_tokens,
    )
