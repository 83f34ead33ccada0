from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import median

import pytest

from epd.errors import ConfigError
from epd.simulator.marginals import FILE_NAME, Distribution, built_in, load
from epd.simulator.requests import SimRequest
from epd.simulator.workloads import SIZES, Popularity, azure, mixed
from tests.simulator.requests import PROFILE

NAMES = (
    *("num_images_given_image", "input_tokens_image", "input_tokens_text"),
    *("output_tokens_image", "output_tokens_text"),
)


def summary(requests: list[SimRequest]) -> list[object]:
    return [(r.arrival_s, r.images, r.prompt, r.num_output_tokens) for r in requests]


def test_a_distribution_is_log_linear_between_its_knots() -> None:
    found = Distribution([(10, 0.2), (1000, 0.6), (1000, 0.9), (4000, 1.0)])
    assert found.at(0.1) == pytest.approx(10)
    assert found.at(0.4) == pytest.approx(100)
    assert found.at(0.8) == pytest.approx(1000)
    assert found.at(0.95) == pytest.approx(2000)
    assert found.at(1.0) == pytest.approx(4000)


@pytest.mark.parametrize(
    "knots", [[], [(1, 0.5)], [(2, 0.1), (1, 1)], [(1, 0.5), (2, 0.4), (3, 1)], [(0, 0.5), (1, 1)]]
)
def test_a_distribution_that_does_not_increase_to_one_is_refused(
    knots: list[tuple[float, float]],
) -> None:
    with pytest.raises(ValueError, match=r"share|after"):
        Distribution(knots)


def test_marginals_are_read_from_a_folder(tmp_path: Path) -> None:
    cdf = {name: [[7, 0.5], [70, 1.0]] for name in NAMES}
    (tmp_path / FILE_NAME).write_text(json.dumps({"cdf": cdf}))
    assert load(tmp_path).output_tokens_text.at(0.5) == pytest.approx(7)
    assert load(tmp_path).source == FILE_NAME


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "no cumulative"),
        ("[]", "no cumulative"),
        ('{"cdf": {}}', "num_images_given_image' is missing"),
        (json.dumps({"cdf": {name: [[1, 0.5]] for name in NAMES}}), "last share"),
    ],
)
def test_a_file_that_is_none_names_itself_and_the_fault(
    text: str | None, why: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=why) as error:
        load(tmp_path)
    assert FILE_NAME in error.value.message


def test_the_nth_is_drawn_by_a_weight_of_one_nth() -> None:
    popularity = Popularity(exponent=1.0)
    for _ in range(3):
        popularity.add()
    random = Random(0)
    counts = [0, 0, 0]
    for _ in range(6000):
        counts[popularity.draw(random)] += 1
    # 6/11, 3/11 and 2/11; the standard deviations are 39 and less.
    assert counts == pytest.approx([3273, 1636, 1091], abs=160)


@pytest.mark.parametrize("draw", [azure, mixed])
def test_a_seed_draws_the_same_requests_and_another_seed_others(draw: object) -> None:
    def drawn(seed: int) -> list[object]:
        return summary(draw(30, seed, PROFILE.model, built_in()))  # type: ignore[operator]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("draw", [azure, mixed])
def test_requests_come_in_order_at_one_a_second(draw: object) -> None:
    requests: list[SimRequest] = draw(200, 0, PROFILE.model, built_in())  # type: ignore[operator]
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] == pytest.approx(200)


def test_azure_has_the_marginals_and_half_of_its_pictures_were_seen_before() -> None:
    marginals = built_in()
    requests = azure(1200, 0, PROFILE.model, marginals)
    with_images = [r for r in requests if r.images]
    texts = [r for r in requests if not r.images]
    assert len(with_images) / len(requests) == pytest.approx(0.5, abs=0.12)
    assert median(r.prompt.num_tokens for r in texts) == pytest.approx(
        marginals.input_tokens_text.at(0.5), rel=0.15
    )
    assert median(r.num_output_tokens for r in texts) == pytest.approx(
        marginals.output_tokens_text.at(0.5), rel=0.2
    )
    seen: set[tuple[object, ...]] = set()
    num_seen_before = 0
    fresh: list[SimRequest] = []
    for request in with_images:
        if request.images in seen:
            num_seen_before += 1
        else:
            fresh.append(request)
            seen.add(request.images)
    assert num_seen_before / len(with_images) == pytest.approx(0.5, abs=0.06)
    assert sum(len(r.images) == 1 for r in fresh) / len(fresh) == pytest.approx(0.66, abs=0.1)
    assert median(r.prompt.num_tokens for r in fresh) == pytest.approx(
        marginals.input_tokens_image.at(0.48), rel=0.25
    )
    longest = max(request.prompt.num_tokens + request.max_new_tokens for request in requests)
    assert 20_000 < longest <= PROFILE.model.context_tokens


def test_mixed_has_pictures_of_all_sizes_and_none_twice() -> None:
    requests = mixed(200, 0, PROFILE.model, built_in())
    images = [image for request in requests for image in request.images]
    assert len({image.content_hash for image in images}) == len(images)
    sizes = {image.num_tokens for image in images}
    assert len(sizes) >= len(SIZES) - 2  # the largest are shrunk to nearly the same
    assert min(sizes) < 10 < 1000 < max(sizes) <= 1280
