from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engines.sim import Profile
from epd.simulator.baselines import SYSTEMS
from epd.simulator.fleet import Split
from epd.simulator.marginals import built_in
from epd.simulator.requests import SimRequest
from epd.simulator.run import simulate
from epd.simulator.workloads import azure
from tests.simulator.requests import PROFILE, ask, image

JITTERY = PROFILE.model_copy(update={"jitter_ratio": 0.3})
# Little of everything, so that requests wait for each other in all places.
TIGHT = Profile.model_validate(
    {
        "encode": {"cache_image_tokens": 3000, "window": 2},
        "prefill": {"kv_capacity_tokens": 4000},
        "decode": {"kv_capacity_tokens": 4000, "max_running_requests": 3},
    }
)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(list(SYSTEMS)),
    st.lists(
        st.tuples(st.floats(0, 0.3), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
)
def test_every_request_ends_once_and_nothing_is_left(
    name: str, drawn: list[tuple[float, list[int], int]]
) -> None:
    """That no server holds anything afterwards is asserted by `simulate` itself."""
    requests: list[SimRequest] = []
    now_s = 0.0
    for number, (gap_s, pictures, num_output_tokens) in enumerate(drawn):
        now_s += gap_s
        images = [image(n, 100 * n + 50) for n in pictures]
        requests.append(ask(number, *images, arrival_s=now_s, num_output_tokens=num_output_tokens))
    run = simulate(requests, SYSTEMS[name], split=Split(2, 2, 2), profile=TIGHT)
    assert sorted(served.request.request_id for served in run.served) == sorted(
        request.request_id for request in requests
    )
    for served in run.served:
        assert served.arrival_s == pytest.approx(served.request.arrival_s, abs=1e-8)
        assert served.arrival_s < served.first_token_s <= served.end_s
        assert (served.first_token_s < served.end_s) == (served.request.num_output_tokens > 1)


def story(name: str, seed: int) -> list[tuple[str, float, float]]:
    requests = azure(25, 3, PROFILE.model, built_in())
    run = simulate(
        requests, SYSTEMS[name], split=Split(2, 4, 2), profile=JITTERY, rate_per_s=15, seed=seed
    )
    return [(s.request.request_id, s.first_token_s, s.end_s) for s in run.served]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_seed_decides_everything(name: str) -> None:
    assert story(name, 1) == story(name, 1)
    assert story(name, 1) != story(name, 2)


def test_the_order_of_things_does_not_hang_on_the_process() -> None:
    """Sets of strings have another order in each process."""
    code = "from tests.simulator.test_conservation import story; print(story('epd', 1))"

    def tell(hash_seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )

    told = [process.communicate(timeout=100)[0] for process in [tell("1"), tell("2")]]
    assert told[0] == told[1] != ""
