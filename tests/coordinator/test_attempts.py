"""Requests whose worker failed before the first token are sent to others, or end with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from epd.config import RetryConfig
from epd.coordinator.retry_budget import RetryBudget
from epd.types import Stage, WorkerState
from tests.fakes.deployment import TOKEN, Deployment, deployed, image_part

CHAT = "/v1/chat/completions"
TWO_OF_EACH = dict.fromkeys(Stage, 2)
PAIR = [Stage.PREFILL, Stage.DECODE]


def receiver(d: Deployment, stage: Stage) -> Any:
    """The one worker of a stage that has been given the request."""
    (worker,) = [w for w in d.fleet.of(stage) if w.received]
    return worker


def other(d: Deployment, worker: Any) -> Any:
    (found,) = [w for w in d.fleet.of(worker.stage) if w is not worker]
    return found


async def held_chat(d: Deployment, stage: Stage, **fields: Any) -> tuple[asyncio.Task[Any], Any]:
    """A request that hangs at a worker of `stage`, and the worker."""
    hold = asyncio.Event()
    for worker in d.fleet.of(stage):
        worker.faults.hold = hold
    pending = asyncio.create_task(d.chat(**fields))
    await d.fleet.until(lambda: any(w.received for w in d.fleet.of(stage)))
    held = receiver(d, stage)
    other(d, held).faults.hold = None
    return pending, held


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", PAIR)
async def test_a_request_whose_worker_dies_is_answered_by_another(
    stage: Stage, stream: bool
) -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        pending, held = await held_chat(d, stage, stream=stream)
        await held.die()
        answer = await pending
        assert answer.status == 200
        assert b"tok" in answer.body
        first, second = held.bodies(CHAT)[0], other(d, held).bodies(CHAT)[0]
        assert first["bootstrap_room"] != second["bootstrap_room"]
        assert second["rid"] == f"{first['rid']}.2"
        record = await d.record(answer)
        assert record["outcome"] == "finished"
        assert len(record["retries"]) == 1
        assert f"{stage} worker {held.worker_id}" in record["retries"][0]


@pytest.mark.parametrize("stage", PAIR)
@pytest.mark.parametrize(
    ("faults", "code"), [({"status": 500}, "worker_failed"), ({"status": 503}, "worker_failed")]
)
async def test_a_worker_that_answers_with_an_error_is_left_out(
    stage: Stage, faults: Mapping[str, Any], code: str
) -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        for worker in d.fleet.of(stage):
            worker.faults.status = faults["status"]
        d.fleet.of(stage)[1].faults.status = None
        for _ in range(4):
            assert (await d.chat()).status == 200
        num_retries = (await d.metrics()).get(f"epd_retries_total[('code', '{code}')]", 0)
        assert num_retries == len(d.fleet.of(stage)[0].bodies(CHAT)) > 0


@pytest.mark.parametrize("stage", PAIR)
async def test_the_next_life_of_a_worker_takes_its_requests(stage: Stage) -> None:
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.hold = asyncio.Event()
        pending = asyncio.create_task(d.chat())
        await d.fleet.until(lambda: worker.received)
        worker.faults.hold = None
        await worker.register(epoch=2)
        assert (await pending).status == 200


@pytest.mark.parametrize("stage", PAIR)
async def test_the_first_failure_is_told_where_there_is_no_other_worker(stage: Stage) -> None:
    async with deployed() as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.status = 500
        answer = await d.chat()
        assert answer.status == 502
        assert f"{stage}-0 says no" in answer.error["message"]
        assert len(worker.bodies(CHAT)) == 1


async def test_no_more_attempts_are_made_than_allowed() -> None:
    workers = {Stage.ENCODE: 1, Stage.PREFILL: 1, Stage.DECODE: 5}
    async with deployed(workers=workers, retry={"max_attempts": 3}) as d:
        for worker in d.fleet.of(Stage.DECODE):
            worker.faults.status = 500
        answer = await d.chat()
        assert answer.status == 502
        assert sum(len(w.bodies(CHAT)) for w in d.fleet.of(Stage.DECODE)) == 3
        assert len({w.worker_id for w in d.fleet.of(Stage.DECODE) if w.received}) == 3


async def test_a_clients_mistake_is_not_tried_again() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        for worker in d.fleet.of(Stage.PREFILL):
            worker.faults.status = 400
        assert (await d.chat()).status == 400
        assert sum(len(w.bodies(CHAT)) for w in d.fleet.of(Stage.PREFILL)) == 1


async def test_a_complaint_of_a_peer_leaves_out_both_if_there_are_others() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        bad = {"error": {"message": "no KV came", "code": "transfer_failed"}}
        hold = asyncio.Event()
        for worker in d.fleet.of(Stage.DECODE):
            worker.faults.hold = hold
        pending = asyncio.create_task(d.chat())
        await d.fleet.until(lambda: all(any(w.received for w in d.fleet.of(s)) for s in PAIR))
        first = {receiver(d, stage).worker_id for stage in PAIR}
        decode = receiver(d, Stage.DECODE)
        decode.faults.status, decode.faults.body = 502, bad
        hold.set()
        answer = await pending
        assert answer.status == 200
        placed = [p["worker_id"] for p in (await d.record(answer))["placements"]]
        assert set(placed[:2]) == first
        assert set(placed[2:]).isdisjoint(first)
        assert len(placed) == 4


async def test_an_image_that_no_worker_can_encode_is_no_fault_of_prefill() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        for worker in d.fleet.of(Stage.ENCODE):
            worker.faults.status = 500
        answer = await d.chat(image_part())
        assert answer.status == 502
        assert sum(len(w.bodies(CHAT)) for w in d.fleet.of(Stage.PREFILL)) == 1
        assert all(w.breaker.is_closed for w in d.coordinator.registry.all())


async def test_images_are_encoded_for_the_next_attempt_too() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        prefills = d.fleet.of(Stage.PREFILL)
        for worker in prefills:
            worker.faults.cut = True
        prefills[1].faults.cut = False
        answers = [await d.chat(image_part()) for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3


async def test_a_worker_that_keeps_failing_gets_no_more_work_until_it_is_tried_again() -> None:
    workers = {Stage.ENCODE: 1, Stage.PREFILL: 2, Stage.DECODE: 1}
    breaker = {"max_failures": 2, "open_s": 60.0}
    routing = {"prefill": "round_robin"}
    async with deployed(workers=workers, breaker=breaker, routing=routing) as d:
        bad = d.prefill
        bad.faults.status = 500
        for _ in range(8):
            assert (await d.chat()).status == 200
        assert len(bad.bodies(CHAT)) == 2
        gauge = "epd_circuit_breakers_open[('stage', 'prefill')]"
        assert (await d.metrics())[gauge] == 1
        answer = await d.request("GET", "/admin/workers", headers=TOKEN.headers)
        listed = answer.json["workers"]
        assert [w["worker_id"] for w in listed if w["is_left_alone"]] == [bad.worker_id]
        await bad.register(epoch=2)  # a new life starts with a clean record
        assert (await d.metrics())[gauge] == 0


async def test_where_all_fail_all_are_still_tried() -> None:
    async with deployed(breaker={"max_failures": 1, "open_s": 60.0}) as d:
        d.decode.faults.status = 500
        assert [(await d.chat()).status for _ in range(2)] == [502, 502]
        d.decode.faults.status = None
        assert (await d.chat()).status == 200


async def test_retries_of_what_living_workers_fail_at_are_bounded() -> None:
    workers = {Stage.ENCODE: 1, Stage.PREFILL: 1, Stage.DECODE: 2}
    retry = {"max_ratio": 0.0, "min_at_once": 0}
    async with deployed(workers=workers, retry=retry) as d:
        for worker in d.fleet.of(Stage.DECODE):
            worker.faults.status = 500
        assert (await d.chat()).status == 502
        assert sum(len(w.bodies(CHAT)) for w in d.fleet.of(Stage.DECODE)) == 1


@pytest.mark.parametrize("stage", PAIR)
async def test_what_a_dead_worker_leaves_is_moved_whatever_the_budget(stage: Stage) -> None:
    retry = {"max_ratio": 0.0, "min_at_once": 0}
    async with deployed(workers=TWO_OF_EACH, retry=retry) as d:
        pending, held = await held_chat(d, stage)
        await held.register(state=WorkerState.GONE)
        assert (await pending).status == 200


async def test_a_client_that_leaves_during_the_second_attempt_ends_it() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        hold = asyncio.Event()
        for worker in d.fleet.of(Stage.DECODE):
            worker.faults.hold = hold
        pending = asyncio.create_task(d.chat())
        await d.fleet.until(lambda: any(w.received for w in d.fleet.of(Stage.DECODE)))
        first = receiver(d, Stage.DECODE)
        second = other(d, first)
        await first.die()
        await d.fleet.until(lambda: second.received)
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending
        await d.settle()
        (body,) = second.bodies(CHAT)
        await d.fleet.until(lambda: body["rid"] in second.aborted)
        assert (await d.last_record())["outcome"] == "aborted"


def test_the_budget_is_a_share_of_the_requests_in_flight_and_a_few_more() -> None:
    num_in_flight = 0
    budget = RetryBudget(RetryConfig(max_ratio=0.1, min_at_once=1), lambda: num_in_flight)
    with budget.running():
        assert not budget.has_room
        num_in_flight = 20
        assert budget.has_room
        with budget.running():
            assert not budget.has_room
    assert budget.num_running == 0


@pytest.mark.parametrize("stage", PAIR)
async def test_a_worker_that_answers_nobody_is_left_to_itself(stage: Stage) -> None:
    async with deployed(workers=TWO_OF_EACH, retry={"hang_s": 0.2}) as d:
        pending, held = await held_chat(d, stage, stream=True)
        answer = await pending
        assert answer.status == 200
        (reason,) = (await d.record(answer))["retries"]
        assert "has answered nobody for 0.2 s" in reason
        (worker,) = [w for w in d.coordinator.registry.all() if w.worker_id == held.worker_id]
        assert not worker.breaker.is_closed


@pytest.mark.parametrize("stage", PAIR)
async def test_a_worker_that_answers_others_is_busy_and_does_not_hang(stage: Stage) -> None:
    in_turn = {"prefill": "round_robin", "decode": "round_robin"}
    async with deployed(workers=TWO_OF_EACH, retry={"hang_s": 0.3}, routing=in_turn) as d:
        pending, held = await held_chat(d, stage)
        hold = held.faults.hold
        for worker in d.fleet.of(stage):
            worker.faults.hold = None
        for _ in range(12):
            assert (await d.chat()).status == 200
            await asyncio.sleep(0.05)
        hold.set()
        answer = await pending
        assert (answer.status, (await d.record(answer))["retries"]) == (200, [])


@pytest.mark.parametrize("stage", Stage)
async def test_with_no_other_worker_to_go_to_a_request_waits_for_a_slow_one(stage: Stage) -> None:
    async with deployed(retry={"hang_s": 0.1}) as d:
        (worker,) = d.fleet.of(stage)
        worker.faults.hold = asyncio.Event()
        pending = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: worker.received)
        await asyncio.sleep(0.4)
        worker.faults.hold.set()
        answer = await pending
        assert (answer.status, (await d.record(answer))["retries"]) == (200, [])


async def test_an_image_at_a_hung_encode_worker_goes_to_another() -> None:
    async with deployed(workers=TWO_OF_EACH, retry={"hang_s": 0.3}) as d:
        for worker in d.fleet.of(Stage.ENCODE):
            worker.faults.hold = asyncio.Event()
        pending = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: any(w.received for w in d.fleet.of(Stage.ENCODE)))
        for worker in d.fleet.of(Stage.ENCODE):
            worker.faults.hold = None
        answer = await pending
        assert answer.status == 200
        record = await d.record(answer)
        assert record["retries"] == []  # the pair was waiting, with good reason
        places = [p for p in record["placements"] if p["stage"] == "encode"]
        assert len({p["worker_id"] for p in places}) == 2
