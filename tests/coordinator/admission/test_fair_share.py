"""Tenants have shares by work, not by requests; a flood of one starves nobody."""

from epd.auth import ANONYMOUS, Caller
from epd.config import AdmissionConfig, InteractiveConfig, RequestConfig
from epd.coordinator.admission import StageWork
from epd.errors import OverloadedError, RateLimitedError
from epd.types import Stage
from tests.coordinator.admission.simulated import Request, SimulatedFleet

SPEED = 1000.0
FLOODER, OTHER = Caller("flooder"), Caller("other")
# Of 1/8 s and 1/2 s, which sum up without rounding.
SMALL, LARGE = StageWork(0, 125, 200), StageWork(0, 500, 600)
MANY = RequestConfig(max_in_flight=100_000)


def busy_fleet(config: AdmissionConfig | None = None, **limits: RequestConfig) -> SimulatedFleet:
    """Its speed is known, and more waits than it can do for a while."""
    fleet = SimulatedFleet(
        workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (1, SPEED)},
        config=config,
        requests=limits.get("requests", MANY),
        target_s=1e6,
    )
    for _ in range(20):
        fleet.send(SMALL, caller=Caller("earlier"))
    fleet.run()
    assert fleet.pools.meters[Stage.PREFILL].rate == SPEED
    return fleet


def flood(fleet: SimulatedFleet, caller: Caller, num: int, work: StageWork) -> list[Request]:
    return [fleet.send(work, caller=caller) for _ in range(num)]


def work_by(requests: list[Request], until_s: float) -> float:
    return sum(r.work.prefill_tokens for r in requests if (r.first_token_s or 1e9) <= until_s)


def test_a_flood_of_a_thousand_does_not_starve_ten_of_another() -> None:
    fleet = busy_fleet()
    theirs = flood(fleet, FLOODER, 1000, SMALL)
    ours = flood(fleet, OTHER, 10, SMALL)
    fleet.run()
    assert all(r.first_token_s is not None for r in theirs + ours), "and all are served"
    # 10 requests at half the speed take 2.5 s, after the 2 s that are with the workers already.
    assert max(r.ttft_s for r in ours) <= 2.0 + 2.5 + 0.25
    assert max(r.ttft_s for r in theirs) > 100.0


def test_shares_follow_weights_and_count_work_rather_than_requests() -> None:
    fleet = busy_fleet()
    start_s = fleet.now_s
    heavy = flood(fleet, Caller("heavy", weight=3.0), 400, LARGE)
    light = flood(fleet, Caller("light", weight=1.0), 1600, SMALL)
    fleet.run()
    share = work_by(heavy, start_s + 100) / work_by(light, start_s + 100)
    assert 2.7 < share < 3.3


def test_idling_earns_no_credit() -> None:
    fleet = busy_fleet()
    first = flood(fleet, FLOODER, 1000, SMALL)
    fleet.run(fleet.now_s + 50.0)
    came_s = fleet.now_s
    second = flood(fleet, OTHER, 500, SMALL)
    fleet.run()
    theirs = work_by(first, came_s + 22) - work_by(first, came_s + 2)
    ours = work_by(second, came_s + 22) - work_by(second, came_s + 2)
    assert abs(theirs - ours) <= 0.1 * ours


def test_a_full_queue_makes_room_for_who_has_less_than_a_share() -> None:
    fleet = busy_fleet(AdmissionConfig(interactive=InteractiveConfig(max_queue=100)))
    theirs = flood(fleet, FLOODER, 1000, SMALL)
    refused = [r for r in theirs if r.error]
    assert len(refused) > 800
    assert all(isinstance(r.error, RateLimitedError) for r in refused)
    assert "yours among them" in str(refused[-1].error)
    # 2 s with the workers and 100 requests of 1/8 s that wait: 14.5 s.
    assert refused[-1].error is not None and refused[-1].error.retry_after_s == 15.0
    ours = flood(fleet, OTHER, 10, SMALL)
    made_way = [r for r in theirs if r.error and r.ticket]
    assert len(made_way) == 10, "the newest that waited"
    assert {r.ticket.number for r in made_way if r.ticket} == set(
        range(20 + 16 + 90, 20 + 16 + 100)
    )
    fleet.run()
    assert all(r.error is None and r.ttft_s <= 4.75 for r in ours)
    assert all((r.error is None) == (r.first_token_s is not None) for r in theirs)


def test_where_all_places_are_taken_the_heaviest_gives_way_too() -> None:
    fleet = busy_fleet(requests=RequestConfig(max_in_flight=50))
    theirs = flood(fleet, FLOODER, 47, SMALL)
    assert not any(r.error for r in theirs)
    ours = flood(fleet, OTHER, 5, SMALL)
    assert not any(r.error for r in ours)
    assert [r.error is not None for r in theirs] == [False] * 45 + [True] * 2
    assert all(isinstance(r.error, RateLimitedError) for r in theirs[-2:])


def test_a_tenant_whose_requests_all_run_leaves_places_to_others() -> None:
    fleet = SimulatedFleet(workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (1, SPEED)})
    theirs = flood(fleet, FLOODER, 1024, SMALL)  # no speed is known, so none of them waits
    refused = [r for r in theirs if r.error]
    assert len(refused) == 1024 // 16
    assert "more than half of what is served" in str(refused[0].error)
    assert not any(r.error for r in flood(fleet, OTHER, 64, SMALL))
    assert fleet.send(SMALL, caller=OTHER).error is not None, "max_in_flight holds"


def test_without_keys_one_tenant_may_have_all_places() -> None:
    fleet = SimulatedFleet(workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (1, SPEED)})
    assert not any(r.error for r in flood(fleet, ANONYMOUS, 1024, SMALL))
    assert isinstance(fleet.send(SMALL).error, OverloadedError)


def test_a_text_request_passes_images_that_wait_for_encode() -> None:
    fleet = SimulatedFleet(workers={Stage.ENCODE: (1, SPEED), Stage.PREFILL: (1, 50 * SPEED)})
    images = StageWork(500, 625, 700)
    flood(fleet, OTHER, 40, images)
    fleet.run(10.0)
    waiting = flood(fleet, OTHER, 40, images)
    assert waiting[-1].given_s is None
    text = fleet.send(SMALL, caller=OTHER)
    assert text.given_s == fleet.now_s
    fleet.run()
    assert all(r.first_token_s is not None for r in waiting)
