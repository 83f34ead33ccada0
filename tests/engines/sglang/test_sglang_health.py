from __future__ import annotations

from typing import Any

from epd.engines.sglang.health import Progress, load_of
from epd.wire import Load


def loads(**fields: Any) -> dict[str, Any]:
    return {"loads": [{"dp_rank": 0, **fields}]}


def test_loads_are_summed_over_ranks_and_queues() -> None:
    rank = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_waiting_uncached_tokens": 30,
        "num_used_tokens": 100,
        "max_total_num_tokens": 1000,
        "disaggregation": {"mode": "prefill", "prefill_inflight_queue_reqs": 3},
    }
    assert load_of({"loads": [rank, rank]}) == Load(
        num_running_reqs=4,
        num_waiting_reqs=8,
        num_waiting_tokens=60,
        num_used_tokens=200,
        max_total_num_tokens=2000,
    )
    assert load_of({}) == Load()


def test_a_busy_server_that_moves_is_healthy_however_long_it_is_busy() -> None:
    progress = Progress(10.0, 0.0, Load())
    for second in range(100):
        progress.answered(loads(num_running_reqs=5, timestamp=float(second)), float(second))
        assert progress.fault is None


def test_an_idle_server_may_stand_still() -> None:
    progress = Progress(10.0, 0.0, Load())
    for second in range(0, 100, 5):
        progress.answered(loads(timestamp=1.0), float(second))
    assert progress.fault is None


def test_work_without_movement_is_a_fault_though_it_answers() -> None:
    progress = Progress(10.0, 0.0, Load())
    for second in range(12):
        progress.answered(loads(num_waiting_reqs=1, timestamp=1.0), float(second))
    assert progress.fault is not None
    assert "has not moved" in progress.fault
    assert progress.is_responsive


def test_silence_takes_new_work_away_at_once_and_becomes_a_fault_later() -> None:
    progress = Progress(10.0, 0.0, Load())
    progress.answered(loads(num_running_reqs=1), 1.0)
    progress.silent(2.0)
    assert not progress.is_responsive
    assert progress.fault is None
    assert progress.load.num_running_reqs == 1
    progress.silent(12.0)
    assert progress.fault is not None
    assert "not answered" in progress.fault


def test_a_stage_without_loads_moves_by_answering() -> None:
    progress = Progress(10.0, 0.0, Load())
    for second in range(0, 100, 5):
        progress.answered(None, float(second))
    assert progress.fault is None
