"""What is measured, and who is refused because of it."""

import pytest

from epd.auth import ANONYMOUS, Caller
from epd.config import AdmissionConfig, InteractiveConfig, RequestConfig
from epd.coordinator.admission import StageWork
from epd.coordinator.admission.stage_meter import StageMeter
from epd.errors import OverloadedError, RateLimitedError
from epd.types import RequestClass, Stage
from tests.coordinator.admission.simulated import SimulatedFleet

SPEED = 1000.0
WORK = StageWork(0, 100, 200)
MANY = RequestConfig(max_in_flight=100_000)
INTERACTIVE = RequestClass.INTERACTIVE


def fleet_of(num: int = 1, target_s: float = 60.0) -> SimulatedFleet:
    return SimulatedFleet(
        workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (num, SPEED)},
        requests=MANY,
        target_s=target_s,
    )


def test_nobody_is_refused_or_kept_waiting_before_a_speed_is_known() -> None:
    fleet = fleet_of(target_s=1.0)
    sent = [fleet.send(WORK) for _ in range(900)]
    assert all(r.given_s == 0.0 and r.error is None for r in sent)


def test_nobody_is_refused_by_a_speed_that_was_not_measured_under_load() -> None:
    fleet = fleet_of(num=4, target_s=5.0)
    for second in range(20):  # one at a time: the pool seems a quarter as fast as it is
        fleet.at(second * 0.1, lambda: fleet.send(WORK))
    fleet.run()
    assert fleet.pools.meters[Stage.PREFILL].rate == pytest.approx(SPEED / 4, rel=0.1)
    burst = [fleet.send(WORK) for _ in range(150)]  # 3.75 s of work
    assert not any(r.error for r in burst)
    fleet.run()
    assert max(r.ttft_s for r in burst) == pytest.approx(3.8, rel=0.1)
    assert fleet.pools.meters[Stage.PREFILL].rate == pytest.approx(SPEED, rel=0.2)


def overloaded(caller: Caller, target_s: float = 10.0) -> SimulatedFleet:
    """Twice as much arrives as it can do, for 30 s."""
    fleet = fleet_of(target_s=target_s)
    for n in range(600):
        fleet.at(n * 0.05, lambda: fleet.send(WORK, caller=caller))
    fleet.run(29.99)
    return fleet


def test_what_cannot_make_its_target_is_refused_at_once_and_the_rest_makes_it() -> None:
    fleet = overloaded(ANONYMOUS)
    refused = [r for r in fleet.requests if r.error]
    assert refused
    fleet.run()
    answered = [r for r in fleet.requests if not r.error]
    assert len(refused) + len(answered) == 600
    assert max(r.ttft_s for r in answered) <= 10.0 * 1.05
    # It refuses no more than it must: 30 s of arrivals and 10 s of waiting, of 10 requests/s.
    assert len(answered) >= 0.95 * 400


def test_a_tenant_behind_its_own_load_gets_429_and_one_behind_others_503() -> None:
    fleet = overloaded(Caller("busy"))
    own = fleet.send(StageWork(0, 2000, 2100), caller=Caller("busy"))
    assert isinstance(own.error, RateLimitedError) and own.error.status == 429
    # 10 s are with the workers or wait, and it takes 2 s itself, of which 10 s are wanted.
    assert own.error.retry_after_s in (2.0, 3.0)
    for name in "abcdefgh":
        fleet.send(StageWork(0, 1000, 1100), caller=Caller(name))
    other = fleet.send(StageWork(0, 1500, 1600), caller=Caller("other"))
    assert isinstance(other.error, OverloadedError) and other.error.status == 503
    assert "retry after the time in Retry-After" in other.error.message
    assert other.error.retry_after_s is not None and other.error.retry_after_s >= 1.0
    small = fleet.send(WORK, caller=Caller("small"))
    assert small.error is None, "its share comes first"


def test_a_slower_fleet_is_noticed_under_load() -> None:
    fleet = fleet_of(target_s=1e6)
    for _ in range(30):
        fleet.send(WORK)
    fleet.run()
    meter = fleet.pools.meters[Stage.PREFILL]
    assert meter.rate == pytest.approx(SPEED)
    for _ in range(400):
        fleet.send(WORK)
    for worker in fleet.workers[Stage.PREFILL]:
        worker.tokens_per_s = SPEED / 4
    fleet.run(60.0)
    assert fleet.scheduler.num_waiting
    assert meter.rate == pytest.approx(SPEED / 4, rel=0.1)
    assert meter.seconds(meter.tokens_given) <= 2.0 + 0.1


def test_a_new_worker_counts_at_once() -> None:
    config = AdmissionConfig(interactive=InteractiveConfig(max_backlog_s=1.0))
    fleet = SimulatedFleet(
        workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (1, SPEED)}, config=config, requests=MANY
    )
    for _ in range(30):
        fleet.send(WORK)
    fleet.run()
    for _ in range(100):
        fleet.send(WORK)
    meter = fleet.pools.meters[Stage.PREFILL]
    assert meter.tokens_given == 1000
    meter.num_workers = 3
    assert len(fleet.scheduler.advance(fleet.now_s)) == 20


def test_without_workers_requests_go_on_and_are_told_by_placement() -> None:
    fleet = fleet_of()
    for _ in range(30):
        fleet.send(WORK)
    fleet.run()
    waiting = [fleet.send(WORK) for _ in range(100)]
    assert waiting[-1].given_s is None
    fleet.pools.meters[Stage.PREFILL].num_workers = 0
    assert len(fleet.scheduler.advance(fleet.now_s)) == 80


def test_time_without_work_does_not_count_as_slowness() -> None:
    meter = StageMeter(0.0)
    meter.num_workers = 1
    for n in range(40):
        meter.give(n * 100.0, INTERACTIVE, 50)
        meter.start(n * 100.0)
        meter.take_back(n * 100.0 + 0.05, INTERACTIVE, 50, is_done=True)
    assert meter.rate == pytest.approx(1000.0)


def test_what_was_given_up_counts_as_no_work_done() -> None:
    meter = StageMeter(0.0)
    meter.num_workers = 1
    for n in range(10):
        meter.give(float(n), INTERACTIVE, 500)
        meter.start(float(n))
        meter.take_back(n + 1.0, INTERACTIVE, 500, is_done=n % 2 == 0)
    assert meter.rate == pytest.approx(500.0)
    assert meter.num_given == meter.num_present == meter.tokens_given == 0
