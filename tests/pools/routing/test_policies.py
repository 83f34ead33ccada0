"""What holds for every policy, and the baselines."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.config import RoutingConfig
from epd.pools.routing.baselines import least_loaded, random, round_robin
from epd.pools.routing.snapshot import Candidate, Policy
from epd.pools.routing.table import POLICIES, policy_of
from epd.types import Stage
from tests.pools.routing.candidates import idle, pools, snapshot

EACH = [
    pytest.param(make(RoutingConfig()), id=f"{stage}-{name}")
    for stage, policies in POLICIES.items()
    for name, make in policies.items()
]


@pytest.mark.parametrize("stage", list(Stage))
def test_the_configuration_names_exactly_the_policies_there_are(stage: Stage) -> None:
    field = RoutingConfig.model_fields[stage.value]
    assert set(get_args(field.annotation)) == set(POLICIES[stage])
    assert policy_of(stage, RoutingConfig(**{stage.value: "round_robin"})) is round_robin


@pytest.mark.parametrize("policy", EACH)
@settings(deadline=None, max_examples=60)
@given(found=pools, order=st.permutations(range(8)), lot=st.floats(0, 1, exclude_max=True))
def test_a_choice_does_not_depend_on_the_order_of_candidates(
    policy: Policy, found: list[Candidate], order: list[int], lot: float
) -> None:
    choice = policy(snapshot(found, key="k", lot=lot))
    shuffled = [found[index] for index in order if index < len(found)]
    assert policy(snapshot(shuffled, key="k", lot=lot)) == choice
    assert choice.candidate in found
    assert choice.reason


@pytest.mark.parametrize("policy", EACH)
def test_a_pool_in_use_is_used_evenly(policy: Policy) -> None:
    """Round-robin that restarts with each request gives all to the first (vllm#52484)."""
    rng = Random(7)
    pool = {c.worker_id: c for c in idle(4)}
    placed: Counter[str] = Counter()
    for turn in range(1, 2001):
        chosen = policy(
            snapshot(pool.values(), key=str(turn), lot=rng.random(), growth_tokens=10)
        ).worker_id
        placed[chosen] += 1
        pool[chosen] = pool[chosen]._replace(last_turn=turn)
    # By lot or hash, 500 each are expected with a standard deviation of 19.
    assert min(placed.values()) > 400, placed


@pytest.mark.parametrize(
    "policy", [p for p in EACH if not str(p.id).endswith(("round_robin", "random"))]
)
def test_of_equal_workers_the_nearer_is_chosen(policy: Policy) -> None:
    far, near = idle(2, link_tokens=3.0)
    near = near._replace(link_tokens=2.0, last_turn=9)
    for key in map(str, range(50)):
        assert policy(snapshot([far, near], key=key)).worker_id == near.worker_id


def test_least_loaded_counts_tokens_before_requests() -> None:
    many_small = Candidate("b", tokens_in_flight=10, num_in_flight=5)
    one_large = Candidate("a", tokens_in_flight=1000, num_in_flight=1)
    assert least_loaded(snapshot([one_large, many_small])).worker_id == "b"
    fewer = many_small._replace(worker_id="c", num_in_flight=4)
    assert least_loaded(snapshot([many_small, fewer])).worker_id == "c"


def test_least_loaded_goes_further_only_for_more_than_the_link_costs() -> None:
    far = Candidate("far", tokens_in_flight=0, link_tokens=50.0)
    near = Candidate("near", tokens_in_flight=49)
    assert least_loaded(snapshot([far, near])).worker_id == "near"
    assert least_loaded(snapshot([far, near._replace(tokens_in_flight=51)])).worker_id == "far"


def test_a_worker_that_joins_gets_its_turn_and_no_more() -> None:
    pool = [c._replace(last_turn=100 + n) for n, c in enumerate(idle(3))]
    pool.append(Candidate("new"))
    order: list[str] = []
    for turn in range(200, 208):
        chosen = round_robin(snapshot(pool)).worker_id
        order.append(chosen)
        pool = [c._replace(last_turn=turn) if c.worker_id == chosen else c for c in pool]
    assert order == ["new", "w00", "w01", "w02"] * 2


def test_a_lot_falls_on_each_worker_for_an_equal_share_of_its_range() -> None:
    drawn = [random(snapshot(idle(4), lot=lot / 100)).worker_id for lot in range(100)]
    assert Counter(drawn) == {f"w{index:02}": 25 for index in range(4)}
