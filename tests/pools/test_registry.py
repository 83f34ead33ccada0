from __future__ import annotations

from typing import Any

import pytest

from epd.clock import FakeClock
from epd.errors import BadRequestError, NoWorkerError, UnknownModelError, WorkerError
from epd.pools.registry import Registry, Worker
from epd.pools.routing import Place
from epd.types import Stage, WorkerState
from epd.wire import ModelCard, WorkerReport

LEASE_S = 5.0


def report(worker_id: str = "d", **fields: Any) -> WorkerReport:
    model = ModelCard(model_id=fields.pop("model_id", "m"), model_type="t", context_tokens=1)
    return WorkerReport(
        **{
            "worker_id": worker_id,
            "epoch": 1,
            "stage": Stage.DECODE,
            "engine": "fake",
            "state": WorkerState.READY,
            "url": "http://127.0.0.1:1",
            "model": model,
            **fields,
        }
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def registry(clock: FakeClock) -> Registry:
    return Registry(clock, lease_s=LEASE_S)


def only(registry: Registry) -> Worker:
    (worker,) = registry.all()
    return worker


def test_a_reported_worker_is_ready_for_its_stage_and_model_only(registry: Registry) -> None:
    registry.report(report())
    assert [w.worker_id for w in registry.ready(Stage.DECODE, "m")] == ["d"]
    with pytest.raises(NoWorkerError, match="no prefill worker is ready for model 'm'"):
        registry.ready(Stage.PREFILL, "m")
    with pytest.raises(NoWorkerError, match="'other'"):
        registry.ready(Stage.DECODE, "other")


def test_a_starting_worker_gets_no_work(registry: Registry) -> None:
    registry.report(report(state=WorkerState.STARTING))
    with pytest.raises(NoWorkerError):
        registry.ready(Stage.DECODE, "m")
    registry.report(report())
    assert registry.ready(Stage.DECODE, "m")


def test_a_heartbeat_keeps_the_lease(registry: Registry, clock: FakeClock) -> None:
    registry.report(report())
    worker = only(registry)
    for _ in range(5):
        clock.advance(LEASE_S)
        registry.report(report())
    registry.expire()
    assert only(registry) is worker
    assert not worker.lost.is_set()


def test_a_silent_worker_is_lost_when_its_lease_lapses(
    registry: Registry, clock: FakeClock
) -> None:
    registry.report(report())
    worker = only(registry)
    clock.advance(LEASE_S)
    registry.expire()
    assert not worker.lost.is_set()
    clock.advance(0.1)
    with pytest.raises(NoWorkerError):  # without a call of expire: the question itself finds out
        registry.ready(Stage.DECODE, "m")
    assert worker.lost.is_set()
    assert worker.state is WorkerState.LOST
    assert "lease" in str(worker.loss)
    assert "decode worker d" in str(worker.loss)
    assert isinstance(worker.loss, WorkerError)


def test_a_lost_worker_that_reports_again_begins_a_new_life(
    registry: Registry, clock: FakeClock
) -> None:
    registry.report(report())
    old = only(registry)
    clock.advance(LEASE_S + 1)
    registry.expire()
    registry.report(report())
    new = only(registry)
    assert new is not old
    assert new.state is WorkerState.READY
    assert old.lost.is_set()
    assert not new.lost.is_set()


def test_a_worker_that_stays_away_is_forgotten(registry: Registry, clock: FakeClock) -> None:
    registry.report(report())
    clock.advance(3600)
    registry.expire()
    assert registry.all() == []


def test_a_later_start_replaces_the_earlier_life_and_fails_what_ran_on_it(
    registry: Registry,
) -> None:
    registry.report(report(epoch=1))
    old = only(registry)
    registry.report(report(epoch=2, url="http://127.0.0.1:2"))
    assert old.lost.is_set()
    assert "started anew" in str(old.loss)
    assert only(registry).url == "http://127.0.0.1:2"


def test_an_earlier_start_under_the_same_id_is_refused(registry: Registry) -> None:
    registry.report(report(epoch=2))
    with pytest.raises(BadRequestError, match="--worker-id") as caught:
        registry.report(report(epoch=1))
    assert caught.value.param == "epoch"
    assert only(registry).report.epoch == 2


def test_a_worker_whose_clock_was_set_back_is_known_again_once_its_old_lease_lapsed(
    registry: Registry, clock: FakeClock
) -> None:
    registry.report(report(epoch=2))
    clock.advance(LEASE_S + 0.1)
    registry.expire()
    registry.report(report(epoch=1, url="http://127.0.0.1:2"))
    assert only(registry).state is WorkerState.READY
    assert registry.ready(Stage.DECODE, "m")[0].url == "http://127.0.0.1:2"


def test_time_in_which_nobody_listened_does_not_count_against_a_lease(
    registry: Registry, clock: FakeClock
) -> None:
    registry.report(report())
    clock.advance(2 * LEASE_S)
    registry.forgive(2 * LEASE_S)
    assert registry.ready(Stage.DECODE, "m")
    clock.advance(LEASE_S + 0.1)
    registry.expire()
    assert only(registry).lost.is_set()


def test_counts_of_an_old_life_never_reach_the_new_one(registry: Registry) -> None:
    registry.report(report(epoch=1))
    with only(registry).carrying(7):
        registry.report(report(epoch=2))
        assert only(registry).num_in_flight == 0
    assert only(registry).tokens_in_flight == 0


def test_a_suspect_gets_no_work_until_its_next_report(registry: Registry) -> None:
    registry.report(report())
    worker = only(registry)
    registry.suspect(worker)
    assert worker.state is WorkerState.SUSPECT
    assert not worker.lost.is_set()
    with pytest.raises(NoWorkerError):
        registry.ready(Stage.DECODE, "m")
    registry.report(report())
    assert registry.ready(Stage.DECODE, "m") == [worker]


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.LOST])
def test_suspicion_does_not_hide_a_worse_state(registry: Registry, state: WorkerState) -> None:
    registry.report(report())
    worker = only(registry)
    worker.state = state
    registry.suspect(worker)
    assert worker.state is state


def test_a_draining_worker_keeps_what_runs_and_gets_nothing_new(registry: Registry) -> None:
    registry.report(report())
    worker = only(registry)
    registry.report(report(state=WorkerState.DRAINING))
    with pytest.raises(NoWorkerError):
        registry.ready(Stage.DECODE, "m")
    assert only(registry) is worker
    assert not worker.lost.is_set()


def test_a_farewell_removes_the_worker(registry: Registry) -> None:
    registry.report(report())
    worker = only(registry)
    registry.report(report(state=WorkerState.GONE))
    assert registry.all() == []
    assert worker.lost.is_set()
    assert "has left" in str(worker.loss)
    registry.report(report(state=WorkerState.GONE))  # said twice
    assert registry.all() == []


def test_a_new_registry_learns_workers_back_from_one_report(clock: FakeClock) -> None:
    restarted = Registry(clock, lease_s=LEASE_S)
    assert restarted.missing_stages() == list(Stage)
    for stage in Stage:
        restarted.report(report(stage, stage=stage))
    assert restarted.missing_stages() == []
    assert restarted.model("m").model_id == "m"


def test_missing_stages_counts_ready_workers_only(registry: Registry) -> None:
    registry.report(report("e", stage=Stage.ENCODE, state=WorkerState.DRAINING))
    registry.report(report("d", stage=Stage.DECODE))
    assert registry.missing_stages() == [Stage.ENCODE, Stage.PREFILL]


def test_an_unknown_model_is_told_apart_from_a_missing_worker(
    registry: Registry, clock: FakeClock
) -> None:
    with pytest.raises(NoWorkerError, match="registered yet") as caught:
        registry.model("m")
    assert caught.value.retry_after_s
    registry.report(report())
    with pytest.raises(UnknownModelError, match="'x' is not served here; served: m"):
        registry.model("x")
    clock.advance(LEASE_S + 1)
    registry.expire()
    assert registry.model("m").model_id == "m"  # lost is not unknown


def test_closing_ends_every_wait(registry: Registry) -> None:
    registry.report(report())
    worker = only(registry)
    registry.close()
    assert worker.lost.is_set()
    assert "shutting down" in str(worker.loss)


def test_a_closed_registry_gives_no_work_however_alive_its_workers_are(registry: Registry) -> None:
    registry.report(report())
    registry.close()
    registry.report(report())
    with pytest.raises(NoWorkerError):
        registry.ready(Stage.DECODE, "m")


def test_the_end_of_a_life_is_told_once_and_before_the_next_begins(
    registry: Registry, clock: FakeClock
) -> None:
    ended: list[tuple[int, WorkerState]] = []
    registry.on_end(lambda worker: ended.append((worker.report.epoch, worker.state)))
    registry.report(report())
    registry.report(report(epoch=2))
    assert ended == [(1, WorkerState.LOST)]
    clock.advance(LEASE_S + 1)
    registry.expire()
    registry.expire()
    assert ended[1:] == [(2, WorkerState.LOST)]
    registry.report(report(epoch=3))
    registry.report(report(epoch=3, state=WorkerState.GONE))
    registry.close()
    assert ended[2:] == [(3, WorkerState.GONE)]


def test_a_workers_place_is_its_labels_and_the_host_of_its_url(registry: Registry) -> None:
    registry.report(report(url="http://[fd00::1]:80", labels={"zone": "z", "rack": "r"}))
    assert only(registry).place == Place("fd00::1", "r", "z")


def test_carrying_is_counted_back_when_the_request_fails(registry: Registry) -> None:
    registry.report(report())
    worker = only(registry)
    with pytest.raises(ValueError, match="x"), worker.carrying(7):
        assert (worker.num_in_flight, worker.tokens_in_flight) == (1, 7)
        raise ValueError("x")
    assert (worker.num_in_flight, worker.tokens_in_flight, worker.num_placed) == (0, 0, 1)


@pytest.mark.parametrize("stage", Stage)
def test_only_a_prefill_worker_is_thought_to_get_on_with_its_oldest_request(
    stage: Stage, registry: Registry, clock: FakeClock
) -> None:
    registry.report(report(stage=stage))
    worker = only(registry)
    with worker.carrying(400) as piece:
        clock.advance(2.0)
        piece.is_done = True
    with worker.carrying(1000), worker.carrying(1000):
        clock.advance(3.0)
        assert worker.tokens_in_flight == 2000
        assert worker.done_tokens == (600 if stage is Stage.PREFILL else 0)
    assert (worker.tokens_in_flight, worker.done_tokens) == (0, 0)
