"""Times that can be computed by hand from the default profile, in milliseconds."""

from __future__ import annotations

from typing import Any

import pytest

from epd.engines.sim import Profile
from epd.simulator.baselines import SYSTEMS
from epd.simulator.fleet import Split
from epd.simulator.requests import SimRequest
from epd.simulator.run import Run, Served, simulate
from tests.simulator.requests import PROFILE, ask, image

ONE_OF_EACH = Split(1, 1, 1)
SYSTEM_NAMES = list(SYSTEMS)


def serve(
    *requests: SimRequest, name: str = "epd", split: Split = ONE_OF_EACH, **stages: dict[str, Any]
) -> Run:
    changed = {
        stage: getattr(PROFILE, stage).model_copy(update=fields) for stage, fields in stages.items()
    }
    profile: Profile = PROFILE.model_copy(update=changed)
    return simulate(requests, SYSTEMS[name], split=split, profile=profile)


def by_id(run: Run) -> dict[str, Served]:
    return {served.request.request_id: served for served in run.served}


def encode_ms(num_tokens: int) -> float:
    return 5 + 0.03 * num_tokens


def prefill_ms(num_tokens: int) -> float:
    return 8 + 0.1 * num_tokens


def embedding_ms(num_tokens: int) -> float:
    return 0.5 + 0.05 * num_tokens * 3584 * 2 / 2**20


def kv_ms(num_tokens: int) -> float:
    return 0.5 + 0.05 * -(-num_tokens // 16) * 16 * 28 * 2 * 4 * 128 * 2 / 2**20


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_an_undisturbed_text_takes_its_prefill_its_hand_off_and_its_steps(name: str) -> None:
    request = ask(0)
    num_tokens = request.prompt.num_tokens
    (served,) = serve(request, name=name).served
    ttft_ms = prefill_ms(num_tokens) + kv_ms(num_tokens)
    assert served.ttft_s * 1000 == pytest.approx(ttft_ms)
    steps_ms = 2 * (8 + 0.05) + 0.02 * (2 * num_tokens + 1) / 1000
    assert served.end_s * 1000 == pytest.approx(ttft_ms + steps_ms)
    assert served.tpot_s * 1000 == pytest.approx(steps_ms / 2)


@pytest.mark.parametrize("name", SYSTEM_NAMES)
def test_an_image_is_encoded_and_handed_over_before_prefill(name: str) -> None:
    request = ask(0, image(1, 200))
    num_tokens = request.prompt.num_tokens
    (served,) = serve(request, name=name).served
    assert served.ttft_s * 1000 == pytest.approx(
        encode_ms(200) + embedding_ms(200) + prefill_ms(num_tokens) + kv_ms(num_tokens)
    )


def test_a_picture_asked_about_again_is_neither_encoded_nor_prefilled_again() -> None:
    first, again = ask(0, image(1, 320)), ask(1, image(1, 320), arrival_s=1)
    run = serve(first, again)
    assert run.num_encodes == 1
    # The image, its marks and the message's role are cached, in whole blocks of 16 tokens.
    num_cached = (320 + 2 + 2) // 16 * 16
    assert run.num_cached_prompt_tokens == num_cached
    num_tokens = again.prompt.num_tokens
    assert by_id(run)["r1"].ttft_s * 1000 == pytest.approx(
        embedding_ms(320) + prefill_ms(num_tokens - num_cached) + kv_ms(num_tokens)
    )


def test_prompts_wait_for_one_another_at_a_prefill_worker() -> None:
    run = by_id(serve(ask(0), ask(1)))
    num_tokens = run["r0"].request.prompt.num_tokens
    assert run["r1"].ttft_s * 1000 == pytest.approx(2 * prefill_ms(num_tokens) + kv_ms(num_tokens))


def test_a_request_waits_at_prefill_until_decode_has_room() -> None:
    """Room for one prompt of 105 tokens and its longest answer, 64, but not for two."""
    run = by_id(serve(ask(0, num_output_tokens=50), ask(1), decode={"kv_capacity_tokens": 20 * 16}))
    num_tokens = run["r1"].request.prompt.num_tokens
    assert run["r1"].first_token_s - run["r0"].end_s == pytest.approx(kv_ms(num_tokens) / 1000)


def test_equal_images_at_once_are_encoded_once_by_the_coordinator_and_twice_by_turns() -> None:
    requests = [ask(0, image(1)), ask(1, image(1))]
    split = Split(2, 1, 1)
    assert serve(*requests, split=split).num_encodes == 1
    assert serve(*requests, split=split, name="round_robin").num_encodes == 2


def test_requests_arrive_as_much_faster_as_is_asked_for() -> None:
    requests = [ask(number, arrival_s=number) for number in range(4)]
    run = simulate(requests, SYSTEMS["epd"], split=ONE_OF_EACH, profile=PROFILE, rate_per_s=8)
    assert run.span_s == pytest.approx(3 / 8)
    assert [served.arrival_s for served in run.served] == pytest.approx([0, 0.125, 0.25, 0.375])
