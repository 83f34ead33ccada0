"""The encode gateway, through its slots over HTTP, as prefill workers call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from epd.types import Stage
from tests.fakes.deployment import (
    ONE_OF_EACH,
    TOKEN,
    Answer,
    Deployment,
    chat_body,
    data_url,
    deployed,
    image_part,
)
from tests.fakes.fleet import FakeEncode
from tests.media.images import png

CHAT = "/v1/chat/completions"
SPREAD = {"free_encode_queue_tokens": 0}
"""Images of one token each go to different workers while they are in flight together."""


@dataclass
class Flight:
    """A request in flight whose prefill worker is the test itself."""

    deployment: Deployment
    rid: str
    images: list[dict[str, Any]]
    chat: asyncio.Task[Answer]

    async def call(self, path: str, index: int = 0, *, slot: int = 0, **fields: Any) -> Answer:
        body = {"req_id": f"{self.rid}_local_part_{index}", "part_idx": index, **fields}
        path = f"{self.deployment.fleet.slots[slot]}/{path}"
        async with self.deployment.session.post(self.deployment.url + path, json=body) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def encode(self, index: int = 0, **fields: Any) -> Answer:
        items = [self.images[index]]
        return await self.call("encode", index, mm_items=items, num_parts=9, **fields)

    async def metadata(self, index: int = 0, **fields: Any) -> Answer:
        return await self.call("scheduler_receive_meta_data", index, **fields)

    async def receiver(self, index: int = 0, *, url: str = "h:1", **fields: Any) -> Answer:
        fields = {"receive_count": 1, "receive_url": url, **fields}
        return await self.call("scheduler_receive_url", index, **fields)

    async def send(self, index: int = 0, **fields: Any) -> Answer:
        fields = {"accepts_replay": True, **fields}
        return await self.call("send", index, session_id="s", buffer_address=1, **fields)


@asynccontextmanager
async def flight(
    num_images: int = 1, num_encoders: int = 1, **config: Any
) -> AsyncIterator[tuple[Deployment, Flight]]:
    """A request whose prefill and decode worker do nothing until the block ends."""
    workers = {**ONE_OF_EACH, Stage.ENCODE: num_encoders}
    async with deployed(workers=workers, **config) as d:
        d.prefill.faults.hold = d.decode.faults.hold = asyncio.Event()
        parts = [image_part(data_url(png(28 + i, 28))) for i in range(num_images)]
        chat = asyncio.create_task(d.send(chat_body(*parts)))
        await d.fleet.until(lambda: d.prefill.received and d.decode.received)
        body = d.prefill.bodies(CHAT)[0]
        images = [part["image_url"] for part in body["messages"][0]["content"][:-1]]
        try:
            yield d, Flight(d, body["rid"], images, chat)
        finally:
            chat.cancel()
            await asyncio.wait([chat])
            await d.settle()


@pytest.mark.parametrize("num_images", [1, 2, 3, 64])
async def test_every_image_is_fetched_checked_encoded_and_sent_once(num_images: int) -> None:
    async with deployed() as d:
        parts = [image_part(data_url(png(28 + i, 28))) for i in range(num_images)]
        answer = await d.chat(*parts)
        assert answer.status == 200, answer.body
        assert len(d.encode.sent) == len(set(d.encode.sent)) == num_images
        assert (await d.record(answer))["num_images"] == num_images


async def test_two_images_of_a_request_go_to_two_workers() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.ENCODE: 2}, routing=SPREAD) as d:
        parts = [image_part(data_url(png(28 + i, 28))) for i in range(2)]
        assert (await d.chat(*parts)).status == 200
        first, second = d.fleet.of(Stage.ENCODE)
        assert (len(first.sent), len(second.sent)) == (1, 1)


async def test_the_same_picture_twice_in_a_request_is_two_parts() -> None:
    async with deployed() as d:
        part = image_part()
        assert (await d.chat(part, part)).status == 200
        assert len(d.encode.sent) == 2
        hashes = {i["content_hash"] for b in d.encode.bodies("/encode") for i in b["mm_items"]}
        assert len(hashes) == 1


async def test_the_same_picture_is_served_again_in_later_requests() -> None:
    async with deployed() as d:
        part = image_part()
        for _ in range(2):
            assert (await d.chat(part)).status == 200
        assert len(d.encode.sent) == 2


async def test_a_text_request_needs_no_encode_worker() -> None:
    async with deployed(workers={Stage.PREFILL: 1, Stage.DECODE: 1}) as d:
        assert (await d.chat()).status == 200


@pytest.mark.parametrize("early", ["metadata", "send"])
async def test_a_call_that_comes_before_its_part_is_encoded_waits_for_it(early: str) -> None:
    async with flight() as (_, f):
        waiting = asyncio.create_task(getattr(f, early)())
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        assert (await f.encode()).status == 200
        assert (await waiting).status == 200


async def test_calls_about_a_part_follow_it_over_any_slot() -> None:
    async with flight(num_images=2, num_encoders=2, routing=SPREAD) as (d, f):
        for index in range(2):
            await f.encode(index, slot=index)
        for index in range(2):
            sizes = await f.metadata(index, slot=5)
            assert sizes.json["req_id"] == f"{f.rid}_local_part_{index}"
            assert (await f.send(index, slot=7)).status == 200
        assert [len(w.sent) for w in d.fleet.of(Stage.ENCODE)] == [1, 1]


async def test_a_part_weighs_on_its_worker_until_it_has_been_sent() -> None:
    async with flight() as (d, f):
        (worker,) = [w for w in d.coordinator.registry.all() if w.stage is Stage.ENCODE]
        assert worker.num_in_flight == 0
        await f.encode()
        assert (worker.num_in_flight, worker.tokens_in_flight) == (1, 1)
        assert d.coordinator.gateway.num_parts == 1
        await f.send()
        assert (worker.num_in_flight, worker.tokens_in_flight) == (0, 0)


@pytest.mark.parametrize("call", ["encode", "metadata", "send"])
async def test_a_part_of_no_request_in_flight_is_refused(call: str) -> None:
    async with flight() as (_, f):
        stranger = Flight(f.deployment, "somebody-else", f.images, f.chat)
        answer = await getattr(stranger, call)()
        assert answer.status == 400
        assert answer.error["param"] == "req_id"


async def test_a_part_is_placed_once() -> None:
    async with flight() as (d, f):
        assert (await f.encode()).status == 200
        again = await f.encode()
        assert (again.status, again.error["param"]) == (400, "req_id")
        assert len(d.encode.bodies("/encode")) == 1


async def test_an_encode_worker_that_dies_while_encoding_fails_the_request_at_once() -> None:
    async with deployed() as d:
        d.encode.faults.hold = asyncio.Event()
        pending = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: len(d.encode.received) == 2)
        await d.encode.die()
        answer = await pending
        assert answer.status == 502
        assert "encode worker encode-0 vanished" in answer.error["message"]
        assert (await d.chat(image_part())).status == 503
        assert (await d.chat()).status == 200, "text needs no encode worker"


async def test_a_bug_in_placing_a_part_is_logged_and_told_to_all_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object, **__: object) -> None:
        raise KeyError("inner detail")

    async with flight() as (d, f):
        monkeypatch.setattr(d.coordinator.gateway.placement._router, "choose", bug)
        waiting = asyncio.create_task(f.metadata())
        await asyncio.sleep(0.05)
        for answer in (await f.encode(), await waiting):
            assert answer.status == 500
            assert answer.error["message"] == "internal error: see the coordinator's log"
    assert "KeyError: 'inner detail'" in caplog.text


async def test_a_part_on_a_frozen_encode_worker_goes_to_its_next_life() -> None:
    async with deployed() as d:
        d.encode.faults.hold = asyncio.Event()
        pending = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: len(d.encode.received) == 2)
        d.encode.faults.hold = None
        await d.encode.register(epoch=2)
        assert (await pending).status == 200


async def test_the_loss_of_the_last_encode_worker_ends_all_calls_about_the_part() -> None:
    async with flight() as (d, f):
        waiting = asyncio.create_task(f.metadata())
        await asyncio.sleep(0)
        await d.encode.register(state="gone")
        assert (await f.encode()).status == 503
        answer = await waiting
        assert answer.status == 503
        assert "encode" in answer.error["message"]


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (500, 502), (401, 502)])
async def test_an_encode_workers_refusal_reaches_the_client(status: int, seen: int) -> None:
    async with deployed() as d:
        d.encode.faults.status = status
        answer = await d.chat(image_part())
        assert answer.status == seen
        await d.fleet.until(lambda: d.encode.aborted and d.prefill.aborted and d.decode.aborted)


async def test_calls_that_wait_end_with_their_request() -> None:
    async with flight() as (_, f):
        waiting = asyncio.create_task(f.metadata())
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        f.chat.cancel()
        answer = await waiting
        assert answer.status == 502
        assert "ended before" in answer.error["message"]
        assert (await f.encode()).status == 400, "the part is of no request in flight any more"


async def test_a_part_that_is_never_placed_times_out() -> None:
    async with flight(requests={"first_token_s": 0.3}) as (d, f):
        began = asyncio.create_task(f.metadata())
        answer = await began
        assert answer.status in (502, 504)
        assert (await f.chat).status == 504
        assert d.coordinator.gateway.num_parts == 0


async def test_a_part_that_nobody_took_is_dropped_at_the_end_of_a_good_request() -> None:
    """Prefill may have the image's KV cached and never ask for its embeddings."""
    async with flight() as (d, f):
        await f.encode()
        d.fleet.room(d.prefill.bodies(CHAT)[0]["bootstrap_room"]).set()
        d.prefill.faults.status = 200
        d.prefill.faults.hold.set()  # type: ignore[union-attr]
        assert (await f.chat).status == 200
        await d.fleet.until(lambda: d.encode.aborted == [f.rid])
        assert d.prefill.aborted == d.decode.aborted == []


@pytest.mark.parametrize("path", ["encode", "scheduler_receive_meta_data", "send", "health"])
async def test_a_wrong_capability_is_refused(path: str) -> None:
    async with deployed() as d:
        method = "GET" if path == "health" else "POST"
        for capability in ("0" * 32, "%ff%fe", "%00"):
            url = f"/internal/encoders/{capability}/0/{path}"
            answer = await d.request(method, url, b"{}", TOKEN.headers)
            assert answer.status == 401, capability


async def test_sglang_can_probe_a_slot_without_credentials() -> None:
    async with deployed() as d:
        assert len(d.fleet.slots) == 8
        for slot in d.fleet.slots:
            assert (await d.request("GET", f"{slot}/health")).status == 200


@pytest.mark.parametrize("body", [b"", b"nope", b"[]", b'{"req_id": ""}', b'{"req_id": 5}'])
async def test_a_call_that_makes_no_sense_is_a_400(body: bytes) -> None:
    async with deployed() as d:
        for path in ("encode", "scheduler_receive_meta_data", "send"):
            answer = await d.request("POST", f"{d.fleet.slots[0]}/{path}", body)
            assert answer.status == 400


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_idle_encoders_take_turns_over_requests(policy: str) -> None:
    """Round-robin that restarts with each request gives all to encoder 0 (vllm#52484)."""
    async with deployed(workers={**ONE_OF_EACH, Stage.ENCODE: 3}, routing={"encode": policy}) as d:
        for i in range(9):
            assert (await d.chat(image_part(data_url(png(28 + i, 28))))).status == 200
        encoders: list[FakeEncode] = d.fleet.of(Stage.ENCODE)
        assert [len(worker.sent) for worker in encoders] == [3, 3, 3]
