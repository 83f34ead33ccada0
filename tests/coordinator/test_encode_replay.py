"""The encode gateway over deaths, duplicates and queues, for both ways of delivery."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from epd.types import Stage
from tests.coordinator.test_encode_gateway import Flight, flight
from tests.fakes.deployment import ONE_OF_EACH, data_url, deployed, image_part
from tests.fakes.fleet import FakeEncode
from tests.media.images import png


def encoders(d: Any) -> list[FakeEncode]:
    return d.fleet.of(Stage.ENCODE)


def busy(d: Any) -> FakeEncode:
    """The encode worker that was asked first."""
    return next(worker for worker in encoders(d) if worker.bodies("/encode"))


def other(d: Any) -> FakeEncode:
    return next(worker for worker in encoders(d) if worker is not busy(d))


async def eventually(condition: Callable[[], bool]) -> None:
    """For what the coordinator has no event for."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def push(f: Flight, index: int = 0, num_receivers: int = 1) -> list[int]:
    """A part as SGLang's zmq_to_scheduler asks for it; the statuses of all calls."""
    calls = [
        f.encode(index),
        *(f.receiver(index, url=f"h:{rank}") for rank in range(num_receivers)),
    ]
    return [answer.status for answer in await asyncio.gather(*calls)]


@pytest.mark.parametrize("num_receivers", [1, 4])
async def test_a_pushed_part_reaches_every_receiver(num_receivers: int) -> None:
    async with flight(num_encoders=2) as (d, f):
        for worker in encoders(d):
            worker.num_receivers = num_receivers
        assert set(await push(f, num_receivers=num_receivers)) == {200}
        assert len(busy(d).receivers[f"{f.rid}_local_part_0"]) == num_receivers


async def test_a_receiver_may_come_before_its_part() -> None:
    async with flight() as (d, f):
        d.encode.num_receivers = 1
        early = asyncio.create_task(f.receiver())
        done, _ = await asyncio.wait([early], timeout=0.05)
        assert not done
        assert (await f.encode()).status == 200
        assert (await early).status == 200


@pytest.mark.parametrize("after_first_receiver", [False, True])
async def test_a_pushed_part_is_replayed_with_all_its_receivers(
    after_first_receiver: bool,
) -> None:
    async with flight(num_encoders=2) as (d, f):
        for worker in encoders(d):
            worker.num_receivers = 2
        part = f"{f.rid}_local_part_0"
        encoding = asyncio.create_task(f.encode())
        first = asyncio.create_task(f.receiver(url="h:0"))
        await d.fleet.until(lambda: any(w.bodies("/encode") for w in encoders(d)))
        if after_first_receiver:
            assert (await first).status == 200
        dead, alive = busy(d), other(d)
        await dead.die()
        second = await f.receiver(url="h:1")
        answers = [await encoding, await first, second]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert alive.receivers[part] == {"h:0", "h:1"}
        assert alive.sent == [part]


@pytest.mark.parametrize("call", ["metadata", "send"])
async def test_a_part_lost_after_it_was_encoded_is_encoded_again(call: str) -> None:
    async with flight(num_encoders=2) as (d, f):
        assert (await f.encode()).status == 200
        dead, alive = busy(d), other(d)
        await dead.die()
        assert (await getattr(f, call)()).status == 200
        assert len(alive.bodies("/encode")) == 1
        assert (await f.send()).status == 200


async def test_a_receiver_is_told_when_an_earlier_write_may_still_land() -> None:
    async with flight(num_images=2, num_encoders=2) as (d, f):
        assert (await f.encode()).status == 200
        await busy(d).die()
        replayed = await f.send()
        assert replayed.status == 200
        assert json.loads(replayed.body)["is_replayed"] is True
        assert (await f.encode(1)).status == 200
        assert "is_replayed" not in json.loads((await f.send(1)).body)


async def test_a_receiver_that_cannot_guard_its_buffer_gets_no_second_write() -> None:
    async with flight(num_encoders=2) as (d, f):
        assert (await f.encode()).status == 200
        dead, alive = busy(d), other(d)
        await dead.die()
        assert (await f.send(accepts_replay=False)).status == 502
        assert not alive.bodies("/send")


async def test_a_worker_that_failed_at_a_part_is_not_asked_again() -> None:
    async with flight(num_encoders=3) as (d, f):
        for worker in encoders(d)[:2]:
            worker.faults.status = 500
        assert (await f.encode()).status == 200
        assert [len(w.bodies("/encode")) <= 1 for w in encoders(d)] == [True] * 3


async def test_an_image_that_every_worker_fails_at_is_given_up() -> None:
    async with flight(num_encoders=5) as (d, f):
        for worker in encoders(d):
            worker.faults.status = 500
        assert (await f.encode()).status == 502
        assert sum(len(w.bodies("/encode")) for w in encoders(d)) == 3


async def test_a_bad_image_is_not_tried_elsewhere() -> None:
    async with flight(num_encoders=2) as (d, f):
        for worker in encoders(d):
            worker.faults.status = 400
        answer = await f.encode()
        assert answer.status == 400
        assert answer.json["message"], "SGLang looks for the message at the top"
        assert sum(len(w.bodies("/encode")) for w in encoders(d)) == 1


async def test_equal_images_wait_for_one_another_and_go_to_one_worker() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.ENCODE: 2}) as d:
        gates = [asyncio.Event() for _ in encoders(d)]
        for worker, gate in zip(encoders(d), gates, strict=True):
            worker.faults.hold = gate
        part = image_part(data_url(png(28, 28)))
        asked = [asyncio.create_task(d.chat(part)) for _ in range(4)]
        await d.fleet.until(lambda: any(w.bodies("/encode") for w in encoders(d)))
        await asyncio.sleep(0.1)
        assert sum(len(w.bodies("/encode")) for w in encoders(d)) == 1
        for gate in gates:
            gate.set()
        assert [(await task).status for task in asked] == [200] * 4
        assert len(busy(d).bodies("/encode")) == 4
        assert not other(d).bodies("/encode")
        placement = d.coordinator.gateway.placement
        assert (placement.num_placed, placement.num_repeats) == (4, 3)


async def test_no_encoder_idles_while_another_has_a_queue() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.ENCODE: 2}) as d:
        for worker in encoders(d):
            await worker.register(encode_window=1)
            worker.faults.hold = asyncio.Event()
        asked = [
            asyncio.create_task(d.chat(image_part(data_url(png(28 + i, 28))))) for i in range(6)
        ]
        await d.fleet.until(lambda: all(len(w.bodies("/encode")) == 1 for w in encoders(d)))
        await eventually(lambda: d.coordinator.gateway.placement.num_waiting == 4)
        fast, slow = encoders(d)
        assert fast.faults.hold is not None
        assert slow.faults.hold is not None
        fast.faults.hold.set()
        await d.fleet.until(lambda: len(fast.bodies("/encode")) == 5)
        assert len(slow.bodies("/encode")) == 1
        slow.faults.hold.set()
        assert [(await task).status for task in asked] == [200] * 6


async def test_a_part_that_waits_in_the_queue_ends_with_its_request() -> None:
    async with flight(num_images=2) as (d, f):
        await d.encode.register(encode_window=1)
        d.encode.faults.hold = asyncio.Event()
        first = asyncio.create_task(f.encode(0))
        await d.fleet.until(lambda: d.encode.bodies("/encode"))
        second = asyncio.create_task(f.encode(1))
        await eventually(lambda: d.coordinator.gateway.placement.num_waiting == 1)
        f.chat.cancel()
        assert {(await first).status, (await second).status} == {502}
        assert d.coordinator.gateway.placement.num_waiting == 0


async def test_a_worker_that_joins_takes_from_the_queue() -> None:
    async with flight(num_images=2) as (d, f):
        await d.encode.register(encode_window=1)
        d.encode.faults.hold = asyncio.Event()
        first = asyncio.create_task(f.encode(0))
        await d.fleet.until(lambda: d.encode.bodies("/encode"))
        second = asyncio.create_task(f.encode(1))
        await d.fleet.add(Stage.ENCODE, "encode-9")
        assert (await second).status == 200
        d.encode.faults.hold.set()
        assert (await first).status == 200
