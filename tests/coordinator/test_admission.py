"""Classes, queues and deadlines from the API to the workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from epd.auth import APIKeys
from epd.types import RequestClass, Stage
from tests.fakes.deployment import (
    Answer,
    Deployment,
    chat_body,
    data_url,
    deployed,
    image_part,
)
from tests.fakes.fleet import MODEL
from tests.media.images import png

BATCH = {"X-EPD-Class": "batch"}
PICTURE = png()
KEYS = [
    "sk-plain",
    "sk-batch  class=batch name=team-a",
    "sk-inter class=interactive name=team-b weight=2",
]


def key(name: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}", **headers}


async def batch_chat(d: Deployment, **fields: Any) -> Answer:
    return await d.send(chat_body(**fields), BATCH)


@asynccontextmanager
async def one_held(
    d: Deployment, chat: Callable[[Deployment], Awaitable[Answer]] = batch_chat
) -> AsyncIterator[asyncio.Task[Answer]]:
    """A request that stands still at the prefill worker until the block ends."""
    hold = asyncio.Event()
    d.prefill.faults.hold = hold
    num = len(d.prefill.received)
    pending = asyncio.ensure_future(chat(d))
    await d.fleet.until(lambda: len(d.prefill.received) > num)
    try:
        yield pending
    finally:
        d.prefill.faults.hold = None
        hold.set()
        await asyncio.wait([pending])


async def waiting(d: Deployment, num: int, kind: RequestClass = RequestClass.BATCH) -> None:
    async with asyncio.timeout(5):
        while len(d.coordinator.admission.scheduler.queues[kind]) != num:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (key("plain"), "interactive"),
        (key("plain") | BATCH, "batch"),
        (key("plain", **{"X-EPD-Class": " Interactive "}), "interactive"),
        (key("batch"), "batch"),
        (key("batch") | BATCH, "batch"),
        (key("inter"), "interactive"),
        (key("inter") | BATCH, "batch"),
    ],
)
async def test_the_class_comes_from_the_header_within_what_the_key_allows(
    headers: dict[str, str], expected: str
) -> None:
    async with deployed(api_keys=APIKeys(KEYS)) as d:
        answer = await d.send(chat_body(), headers)
        assert answer.status == 200
        record = await d.record(answer)
        assert record["request_class"] == expected
        assert record["tenant"] in ("key-1", "team-a", "team-b")
        assert "sk-" not in str(record)


async def test_a_batch_key_claims_nothing_better_and_an_unknown_class_is_named() -> None:
    async with deployed(api_keys=APIKeys(KEYS)) as d:
        refused = await d.send(chat_body(), key("batch", **{"X-EPD-Class": "interactive"}))
        assert (refused.status, refused.error["code"]) == (403, "forbidden")
        assert "for batch requests only" in refused.error["message"]
        unknown = await d.send(chat_body(), key("plain", **{"X-EPD-Class": "urgent"}))
        assert unknown.status == 400
        assert unknown.error["param"] == "X-EPD-Class"
        assert "interactive or batch" in unknown.error["message"]
        assert not d.prefill.received


async def test_batch_waits_behind_batch_until_a_speed_is_known_and_interactive_does_not() -> None:
    async with deployed() as d, one_held(d) as first:
        second = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        d.prefill.faults.hold = None
        assert (await d.chat()).status == 200, "interactive passes"
        assert not second.done() and not first.done()
        metrics = await d.metrics()
        assert metrics["epd_admission_queue_length[('request_class', 'batch')]"] == 1
        assert metrics["epd_admission_queue_length[('request_class', 'interactive')]"] == 0
    async with asyncio.timeout(5):
        assert (await first).status == (await second).status == 200


async def interactive_chat(d: Deployment) -> Answer:
    return await d.chat()


async def test_what_waits_beyond_its_deadline_is_answered_at_once_and_gone() -> None:
    async with deployed(admission={"batch": {"first_token_s": 0.3}}) as d:
        loop = asyncio.get_running_loop()
        async with one_held(d, interactive_chat) as first:
            began_s = loop.time()
            late = await batch_chat(d)
            assert 0.25 < loop.time() - began_s < 1.5
            assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
            assert "its turn did not come within 0.3 s" in late.error["message"]
            assert late.headers["Retry-After"].isdigit()
            await waiting(d, 0)
            assert len(d.prefill.received) == 1
        assert (await first).status == 200
        assert (await batch_chat(d)).status == 200
        metrics = await d.metrics()
        labels = "[('reason', 'deadline'), ('request_class', 'batch')]"
        assert metrics["epd_requests_rejected_total" + labels] == 1
        waits = "epd_admission_wait_seconds_count[('request_class', 'batch')]"
        assert metrics[waits] == 2


@pytest.mark.parametrize(
    ("deadline", "stage"), [("first_token_s", Stage.PREFILL), ("total_s", Stage.DECODE)]
)
async def test_classes_have_deadlines_of_their_own(deadline: str, stage: Stage) -> None:
    async with deployed(admission={"batch": {deadline: 0.3}}) as d:
        for chat, status in ((batch_chat, 504), (interactive_chat, 200)):
            (worker,) = d.fleet.of(stage)
            worker.faults.hold = hold = asyncio.Event()
            pending = asyncio.ensure_future(chat(d))
            await asyncio.sleep(0.6)
            assert pending.done() == (status == 504)
            hold.set()
            answer = await pending
            assert answer.status == status, answer.body


async def test_a_client_that_leaves_while_waiting_frees_its_place_at_once() -> None:
    async with deployed(admission={"batch": {"max_queue": 1}}) as d, one_held(d) as first:
        leaving = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        refused = await batch_chat(d)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "have fewer in flight" in refused.error["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        leaving.cancel()
        began_s = asyncio.get_running_loop().time()
        await waiting(d, 0)
        assert asyncio.get_running_loop().time() - began_s < 0.5
        next_one = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        d.prefill.faults.hold.set()  # type: ignore[union-attr]
        assert (await first).status == (await next_one).status == 200
        await d.settle()
        states = [record.state.value for record in d.coordinator.log._ended.values()]
        assert sorted(states) == ["aborted", "failed", "finished", "finished"]


async def test_a_waiting_batch_request_makes_way_for_an_interactive_one() -> None:
    async with deployed(requests={"max_in_flight": 2}) as d, one_held(d) as first:
        second = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        d.prefill.faults.hold, hold = None, d.prefill.faults.hold
        assert (await d.chat()).status == 200
        displaced = await second
        assert (displaced.status, displaced.error["code"]) == (503, "overloaded")
        assert "leave no room for batch" in displaced.error["message"]
        assert "Retry-After" in displaced.headers
        assert hold is not None
        hold.set()
        assert (await first).status == 200


@pytest.mark.parametrize(("key_name", "status"), [("plain", 429), ("inter", 503)])
async def test_what_cannot_be_in_time_is_refused_at_once(key_name: str, status: int) -> None:
    admission = {"interactive": {"ttft_target_s": 10.0}}
    async with deployed(api_keys=APIKeys(KEYS), admission=admission) as d:
        body = chat_body()
        body["messages"][0]["content"] = "word " * 100  # 125 tokens, as they are counted
        async with one_held(d, lambda d: d.send(body, key("plain"))):
            (pools,) = d.coordinator.admission._pools.values()
            meter = pools.meters[Stage.PREFILL]
            meter.rate, meter.is_settled = 40.0, True
            sent = [asyncio.create_task(d.send(body | {"seed": 1}, key("plain")))]
            await d.fleet.until(lambda: len(d.prefill.received) == 2)
            # Cached prompts cost nothing, so each of these has another one.
            for n in range(2):
                other = json.loads(json.dumps(body).replace("word", f"wor{n}"))
                sent.append(asyncio.create_task(d.send(other, key("plain"))))
                await waiting(d, n + 1, RequestClass.INTERACTIVE)
            last = chat_body()
            last["messages"][0]["content"] = "last " * 200
            refused = await d.send(last, key(key_name))
            assert refused.status == status
            # At 40 tokens/s: 125 tokens are with the worker, 250 wait and 250 come. For the tenant
            # `team-b`, of weight 2, only half of what waits goes first: 12.5 s, or 9.4 s alone.
            assert "the first token would take about" in refused.error["message"]
            assert refused.headers["Retry-After"] == {429: "6", 503: "3"}[status]
            metrics = await d.metrics()
            labels = "[('reason', 'too_late'), ('request_class', 'interactive')]"
            assert metrics["epd_requests_rejected_total" + labels] == 1
        assert [(await task).status for task in sent] == [200] * 3


async def test_what_waits_when_the_workers_are_gone_is_told_so() -> None:
    async with deployed(lease={"heartbeat_s": 0.1, "lease_s": 0.5}) as d, one_held(d):
        second = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        async with asyncio.timeout(5):
            answer = await second
        assert (answer.status, answer.error["code"]) == (503, "no_worker")


async def test_draining_answers_what_waits() -> None:
    async with deployed() as d, one_held(d) as first:
        second = asyncio.create_task(batch_chat(d))
        await waiting(d, 1)
        await d.coordinator.drain(0.1)
        assert (await first).status == 502
        assert (await second).status == 503


async def test_images_leave_encode_before_prefill_has_handed_over() -> None:
    async with deployed() as d:
        hold = asyncio.Event()
        d.decode.faults.hold = hold
        pending = asyncio.create_task(d.chat(image_part(), image_part()))
        await d.fleet.until(lambda: d.encode.received)
        (pools,) = d.coordinator.admission._pools.values()
        async with asyncio.timeout(5):
            while pools.meters[Stage.ENCODE].num_given:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert pools.meters[Stage.PREFILL].num_present == 1
        assert pools.meters[Stage.DECODE].num_given == 1
        hold.set()
        assert (await pending).status == 200
        await d.settle()
        assert not any(m.num_given or m.num_present for m in pools.meters.values())


async def test_an_image_encoded_before_asks_nothing_of_encode() -> None:
    tokens = {hashlib.sha256(PICTURE).hexdigest(): 4, "another": 5}
    async with deployed() as d:
        work = d.coordinator.pairs.work
        assert work(MODEL, [], tokens, None).encode_tokens == 9
        assert (await d.chat(image_part(data_url(PICTURE)))).status == 200
        await d.settle()
        assert work(MODEL, [], tokens, None).encode_tokens == 5


async def test_a_flood_of_requests_all_end_and_nothing_is_left() -> None:
    admission = {"interactive": {"max_queue": 60}, "batch": {"max_queue": 30}}
    async with deployed(admission=admission, requests={"max_in_flight": 80}) as d:
        sent = [d.send(chat_body(stream=n % 2 == 0), BATCH if n % 3 else None) for n in range(300)]
        answers = await asyncio.gather(*sent)
        statuses = {answer.status for answer in answers}
        assert 200 in statuses and statuses <= {200, 429, 503}
        assert all("Retry-After" in a.headers for a in answers if a.status != 200)
        await d.settle()
        assert d.coordinator.admission.scheduler.num_tickets == 0
        assert not d.coordinator.admission._turns
