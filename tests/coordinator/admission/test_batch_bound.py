"""Batch fills what interactive leaves idle, and delays it by no more than is stated."""

from random import Random

import pytest

from epd.config import AdmissionConfig, BatchConfig
from epd.coordinator.admission import StageWork
from epd.types import RequestClass, Stage
from tests.coordinator.admission.simulated import Request, SimulatedFleet

SPEED = 10_000.0  # tokens/s
SECONDS = 120.0
BATCH_WORK = StageWork(400, 600, 1000)


def run(
    *, load: float, with_batch: bool, seed: int, num_workers: int = 1, backlog_s: float = 0.5
) -> SimulatedFleet:
    """Poisson arrivals of interactive requests, and as much batch as will go."""
    fleet = SimulatedFleet(
        workers={
            Stage.ENCODE: (num_workers, SPEED / num_workers),
            Stage.PREFILL: (num_workers, SPEED / num_workers),
        },
        config=AdmissionConfig(batch=BatchConfig(max_backlog_s=backlog_s, max_kv_ratio=None)),
    )
    random = Random(seed)
    arrival_s = 0.0
    while arrival_s < SECONDS:
        images = random.choice([0, 200, 900])
        work = StageWork(images, images + random.randrange(50, 400), 1000)
        fleet.at(arrival_s, lambda work=work: fleet.send(work))
        arrival_s += random.expovariate(load * SPEED / 600)
    if with_batch:
        for _ in range(60):
            fleet.at(0.0, lambda: keep_sending(fleet))
    fleet.run(SECONDS)
    return fleet


def keep_sending(fleet: SimulatedFleet) -> None:
    """A client of batch: its next request follows the one before."""
    request = fleet.send(BATCH_WORK, request_class=RequestClass.BATCH)
    request.on_first_token = lambda: keep_sending(fleet)


def interactive(fleet: SimulatedFleet) -> list[Request]:
    return [r for r in fleet.requests if r.request_class is RequestClass.INTERACTIVE]


@pytest.mark.parametrize("load", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_batch_delays_no_interactive_request_beyond_the_bound(
    load: float, num_workers: int, seed: int
) -> None:
    alone, beside = (
        interactive(run(load=load, with_batch=with_batch, seed=seed, num_workers=num_workers))
        for with_batch in (False, True)
    )
    pairs = [
        (a, b) for a, b in zip(alone, beside, strict=True) if a.first_token_s and b.first_token_s
    ]
    assert len(pairs) > 100
    # 0.5 s at each of two stages; the speed is measured within a tenth here.
    worst_s = max(b.ttft_s - a.ttft_s for a, b in pairs)
    assert 0.1 < worst_s <= 2 * 0.5 * 1.1


@pytest.mark.parametrize(
    ("num_workers", "backlog_s", "least"), [(1, 0.5, 0.95), (4, 0.5, 0.75), (4, 2.0, 0.95)]
)
@pytest.mark.parametrize("load", [0.0001, 0.5])
def test_batch_fills_what_is_idle(
    load: float, num_workers: int, backlog_s: float, least: float
) -> None:
    fleet = run(load=load, with_batch=True, seed=1, num_workers=num_workers, backlog_s=backlog_s)
    tokens = sum(r.work.prefill_tokens for r in fleet.requests if r.first_token_s is not None)
    # Prefill is the slower of the two stages here.
    assert tokens > least * SPEED * SECONDS


def test_batch_waits_while_anything_interactive_does() -> None:
    fleet = run(load=1.5, with_batch=True, seed=2)
    taken = [r for r in interactive(fleet) if r.error is None]
    ends = [(r.arrived_s, SECONDS if r.given_s is None else r.given_s) for r in taken]
    waits = [(begin, end) for begin, end in ends if end > begin]
    batch = [r.given_s for r in fleet.requests if r.request_class is RequestClass.BATCH]
    given = [when for when in batch if when is not None]
    assert waits and given
    assert not [t for t in given if any(begin < t < end for begin, end in waits)]


def test_without_a_measured_speed_each_worker_gets_one_batch_request() -> None:
    fleet = SimulatedFleet(workers={Stage.ENCODE: (3, SPEED), Stage.PREFILL: (2, SPEED)})
    text = StageWork(0, 600, 700)
    sent = [fleet.send(text, request_class=RequestClass.BATCH) for _ in range(10)]
    assert sum(r.given_s is not None for r in sent) == 2
    fleet.run()
    assert all(r.first_token_s is not None for r in sent)


def test_batch_leaves_kv_for_interactive() -> None:
    config = AdmissionConfig(batch=BatchConfig(max_kv_ratio=0.5))
    fleet = SimulatedFleet(
        workers={Stage.ENCODE: (8, SPEED), Stage.PREFILL: (8, SPEED)},
        config=config,
        kv_tokens=4000,
    )
    sent = [fleet.send(StageWork(0, 10, 900), request_class=RequestClass.BATCH) for _ in range(5)]
    assert sum(r.given_s is not None for r in sent) == 2
    assert fleet.send(StageWork(0, 10, 9000)).given_s is not None, "interactive has no such limit"
