from __future__ import annotations

import pytest

from epd.simulator.figures import Figures, Targets, imbalance, quantile, rate_at
from epd.simulator.run import Run, Served
from tests.simulator.requests import ask, image


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50
    assert quantile(values, 0.99) == 99
    assert quantile(values, 1.0) == 100
    assert quantile([7.0], 0.01) == 7


def test_imbalance_is_one_for_equals_and_the_number_if_one_has_all() -> None:
    assert imbalance([2.0, 2.0, 2.0]) == 1
    assert imbalance([3.0, 1.0, 2.0]) == 1.5
    assert imbalance([0.0, 5.0, 0.0, 0.0]) == 4
    assert imbalance([0.0, 0.0]) == 1


@pytest.mark.parametrize(
    ("attained", "rate"),
    [
        ([1.0, 0.95, 0.85], 25.0),
        ([1.0, 0.9, 0.5], 20.0),
        ([1.0, 0.5, 0.95], 12.0),  # the first time counts
        ([0.95, 0.92, 0.91], 30.0),
        ([0.8, 0.95, 0.95], 0.0),
    ],
)
def test_the_sustained_rate_is_where_attainment_falls_below(
    attained: list[float], rate: float
) -> None:
    assert rate_at(0.9, [10.0, 20.0, 30.0], attained) == pytest.approx(rate)


def test_figures_of_a_run() -> None:
    targets = Targets(ttft_s=1.0, tpot_s=0.1)
    served = (
        Served(ask(0, image(1), num_output_tokens=11), 0.0, 1.0, 2.0),  # just in time
        Served(ask(1, image(1), num_output_tokens=11), 0.0, 1.1, 1.2),  # first token late
        Served(ask(2, image(2), num_output_tokens=11), 1.0, 1.5, 2.6),  # the others late
        Served(ask(3, num_output_tokens=1), 4.0, 4.5, 4.5),
    )
    figures = Figures.of(Run(served, 4.0, 3, (1.0, 3.0), (1.0, 1.0), 200, 50), targets)
    assert figures.attainment == 0.5
    assert figures.goodput_per_s == 0.5
    assert figures.ttft_p50_s == 0.5
    assert figures.ttft_p99_s == pytest.approx(1.1)
    assert figures.tpot_p99_s == pytest.approx(0.11)
    assert figures.encodes_per_image == 1.5
    assert (figures.encode_imbalance, figures.prefill_imbalance) == (1.5, 1.0)
    assert figures.prefix_hit_ratio == 0.25
