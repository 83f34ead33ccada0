from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from epd.bench.report import Spread
from epd.bench.slice import Round, figures, summarise
from epd.bench.slice_reference import Timing, draw_questions


def test_a_round_weighs_tokens_by_time_and_ttft_by_request() -> None:
    timings = [Timing(0.1, 1.0, 10, ""), Timing(0.3, 3.0, 50, "")]
    assert summarise(timings) == Round(ttft_s=0.2, tokens_per_s=15.0)


def test_ratios_are_taken_within_a_round_before_their_spread() -> None:
    served = [Round(0.2, 30.0), Round(0.9, 10.0), Round(0.4, 20.0)]
    plain = [Round(0.1, 10.0), Round(0.3, 10.0), Round(0.1, 10.0)]
    result = figures(served, plain, [40.0, 20.0, 30.0], num_equal=2, num_answers=3)
    assert result["ttft_ratio"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert result["tokens_per_s_ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert result["concurrent_tokens_per_s_ratio"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert (result["num_equal_answers"], result["num_answers"]) == (2, 3)


def test_a_spread_is_the_median_and_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 7.0]) == Spread(median=3.0, low=1.0, high=7.0)


def test_a_seed_draws_the_same_questions_and_another_seed_other_ones() -> None:
    def pictures(seed: int) -> list[bytes]:
        return [question.picture for question in draw_questions(3, seed=seed, max_tokens=1)]

    assert pictures(5) == pictures(5)
    assert not set(pictures(5)) & set(pictures(6))


@pytest.mark.cluster
def test_the_benchmark_ends_with_one_line_of_json_and_equal_answers() -> None:
    command = [sys.executable, "-m", "epd.bench.slice"]
    options = ["--num-rounds", "1", "--num-requests", "2", "--max-tokens", "8"]
    run = subprocess.run(command + options, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert result["num_equal_answers"] == result["num_answers"] == 2
    assert result["ttft_ratio"]["median"] > 0
    assert {"machine", "versions", "options"} <= result.keys()
