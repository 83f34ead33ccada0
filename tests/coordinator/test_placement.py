"""Where requests go, from the API to the fake workers, and what their timelines say of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd.types import Stage
from epd.wire import Load
from tests.coordinator.test_encode_gateway import flight
from tests.fakes.deployment import (
    ONE_OF_EACH,
    Answer,
    Deployment,
    chat_body,
    data_url,
    deployed,
    image_part,
)
from tests.media.images import png

CHAT = "/v1/chat/completions"
TWO_OF_EACH = dict.fromkeys(Stage, 2)
LONG = "".join(f"word {n} " for n in range(100))


def served(d: Deployment, stage: Stage) -> list[int]:
    """Requests, or image parts, that each worker of a stage got."""
    path = "/encode" if stage is Stage.ENCODE else CHAT
    return [len(worker.bodies(path)) for worker in d.fleet.of(stage)]


async def placements(d: Deployment, answer: Answer) -> dict[str, tuple[str, str]]:
    """(worker, reason) by stage."""
    record = await d.record(answer)
    return {p["stage"]: (p["worker_id"], p["reason"]) for p in record["placements"]}


def in_flight(d: Deployment, stage: Stage) -> list[int]:
    workers = [w for w in d.coordinator.registry.all() if w.stage is stage]
    return [worker.tokens_in_flight for worker in workers]


def conversation(*texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
    return {**chat_body(), "messages": messages}


async def test_a_conversation_stays_on_the_prefill_worker_that_has_it() -> None:
    """Affinity recorded on the wrong worker shows as a hit rate of 0 (llm-d-router#2626)."""
    async with deployed(workers={**ONE_OF_EACH, Stage.PREFILL: 4}) as d:
        texts, sent_before = [LONG], 0
        for turn in range(4):
            answer = await d.send(conversation(*texts))
            assert answer.status == 200
            reason = (await placements(d, answer))["prefill"][1].split()
            assert int(reason[2]) == sent_before, reason
            sent_before = int(reason[4])
            texts += ["an answer", f"question {turn}"]
        assert sorted(served(d, Stage.PREFILL)) == [0, 0, 0, 4]


async def test_different_prompts_take_turns_over_idle_prefill_and_decode_workers() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        for n in range(6):
            assert (await d.send(conversation(f"{n} {LONG}"))).status == 200
        assert served(d, Stage.PREFILL) == served(d, Stage.DECODE) == [3, 3]


async def test_an_image_is_part_of_the_prefix() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.PREFILL: 2}) as d:
        parts = [image_part(data_url(png(28 * 9, 28 * n))) for n in (8, 9)]
        homes: list[str] = []
        for part in parts * 2:
            answer = await d.chat(part)
            homes.append((await placements(d, answer))["prefill"][0])
        assert homes[:2] == homes[2:]
        assert len(set(homes)) == 2


async def test_a_prefix_is_forgotten_with_the_life_of_its_worker() -> None:
    async with deployed() as d:
        await d.send(conversation(LONG))
        assert len(d.coordinator.pairs.index) > 0
        await d.prefill.register(epoch=2)
        assert len(d.coordinator.pairs.index) == 0
        d.prefill.epoch = 2
        answer = await d.send(conversation(LONG))
        assert "prefix of 0 of" in (await placements(d, answer))["prefill"][1]


async def test_a_request_weighs_on_prefill_until_decode_has_the_kv() -> None:
    async with deployed() as d:
        d.prefill.faults.hold = prefilled = asyncio.Event()
        d.decode.faults.hold, d.decode.faults.hold_after = decoded, _ = asyncio.Event(), 1
        body = {**conversation(LONG), "stream": True, "max_tokens": 20}
        running = asyncio.create_task(d.send(body))
        await d.fleet.until(lambda: d.prefill.received and d.decode.received)
        assert (in_flight(d, Stage.PREFILL), in_flight(d, Stage.DECODE)) == ([198], [218])
        prefilled.set()
        await d.fleet.until(lambda: d.decode.num_held)
        while in_flight(d, Stage.PREFILL) != [0]:  # noqa: ASYNC110 - the answer is on its way
            await asyncio.sleep(0.005)
        assert in_flight(d, Stage.DECODE) == [218]
        decoded.set()
        assert (await running).status == 200


async def test_only_what_is_not_cached_weighs_on_prefill() -> None:
    async with deployed() as d:
        await d.send(conversation(LONG))
        d.prefill.faults.hold = asyncio.Event()
        running = asyncio.create_task(d.send(conversation(LONG, "a", "b" * 40)))
        await d.fleet.until(lambda: len(d.prefill.received) == 2)
        assert in_flight(d, Stage.PREFILL) == [11]
        d.prefill.faults.hold.set()
        assert (await running).status == 200


async def test_a_decode_worker_that_reports_to_be_full_gets_nothing() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.DECODE: 2}) as d:
        full, roomy = d.fleet.of(Stage.DECODE)
        await full.register(load=Load(num_used_tokens=900, max_total_num_tokens=1000))
        await roomy.register(load=Load(num_used_tokens=4500, max_total_num_tokens=6000))
        for n in range(4):
            assert (await d.send(conversation(f"{n}"))).status == 200
        assert served(d, Stage.DECODE) == [0, 4]


async def test_all_stages_of_a_request_meet_in_one_zone() -> None:
    async with deployed(workers=TWO_OF_EACH) as d:
        # The pools have their zones the other way round, so that no order of names explains it.
        for stage in Stage:
            zones = ["a", "b"] if stage is Stage.PREFILL else ["b", "a"]
            for worker, zone in zip(d.fleet.of(stage), zones, strict=True):
                await worker.register(epoch=2, labels={"zone": zone, "node": worker.worker_id})
        zone_of = {w.worker_id: w.report.labels["zone"] for w in d.coordinator.registry.all()}
        used: set[str] = set()
        for n in range(6):
            answer = await d.chat(image_part(data_url(png(28 * 5, 28 * (n + 1)))))
            chosen = await placements(d, answer)
            assert set(chosen) == set(Stage)
            zones = {zone_of[worker_id] for worker_id, _ in chosen.values()}
            assert len(zones) == 1
            used |= zones
        assert used == {"a", "b"}


async def test_prefill_is_chosen_near_the_encode_worker_that_has_the_image() -> None:
    async with deployed(workers={**TWO_OF_EACH, Stage.DECODE: 1}) as d:
        for stage in (Stage.ENCODE, Stage.PREFILL):
            for worker, zone in zip(d.fleet.of(stage), "ab", strict=True):
                await worker.register(epoch=2, labels={"zone": zone, "node": worker.worker_id})
        part = image_part(data_url(png(28 * 9, 28 * 9)))
        homes: list[dict[str, tuple[str, str]]] = []
        for n in range(5):
            # The text in front makes it another prefix each time.
            content = [{"type": "text", "text": f"{n} look:"}, part]
            body = {**chat_body(), "messages": [{"role": "user", "content": content}]}
            homes.append(await placements(d, await d.send(body)))
        assert len({home["encode"][0] for home in homes}) == 1
        assert len({home["prefill"][0] for home in homes}) == 1
        assert sorted(served(d, Stage.ENCODE)) == [0, 5]


async def test_a_cached_image_is_found_again_and_weighs_nothing() -> None:
    async with deployed(workers={**ONE_OF_EACH, Stage.ENCODE: 3}) as d:
        part = image_part(data_url(png(28 * 9, 28 * 9)))
        first = await placements(d, await d.chat(part))
        home = d.fleet.workers[first["encode"][0]]
        home.faults.hold = asyncio.Event()
        running = asyncio.create_task(d.chat(part))
        await d.fleet.until(lambda: len(home.bodies("/encode")) == 2)
        assert in_flight(d, Stage.ENCODE) == [0, 0, 0]
        home.faults.hold.set()
        second = await placements(d, await running)
        assert second["encode"] == (first["encode"][0], "cached")
        assert d.coordinator.gateway.placement.num_repeats == 1


async def test_images_without_a_hash_are_all_different_and_spread() -> None:
    async with flight(num_encoders=2) as (d, f):
        f.images[:] = [{"url": f.images[0]["url"], "content_hash": None} for _ in range(8)]
        for worker in d.fleet.of(Stage.ENCODE):
            worker.faults.status = 200  # encoded, it says: the fake itself wants a hash
        for index in range(8):
            assert (await f.encode(index)).status == 200
        # 256 tokens each, for want of a better guess; 1.25 times the mean are five of them.
        assert sorted(served(d, Stage.ENCODE)) in ([4, 4], [3, 5])
        assert in_flight(d, Stage.ENCODE) == [256 * n for n in served(d, Stage.ENCODE)]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "random"])
async def test_every_stage_can_use_a_baseline(policy: str) -> None:
    routing = {**dict.fromkeys(map(str, Stage), policy), "seed": 3}
    async with deployed(workers=TWO_OF_EACH, routing=routing) as d:
        for n in range(12):
            assert (await d.chat(image_part(data_url(png(28 + n, 28))))).status == 200
        for stage in Stage:
            least, most = sorted(served(d, stage))
            assert (least, most) == (6, 6) or (policy == "random" and least > 0)


async def test_lots_are_drawn_from_the_seed() -> None:
    drawn: list[list[str]] = []
    for seed in (5, 5, 6):
        routing = {"decode": "random", "seed": seed}
        async with deployed(workers={**ONE_OF_EACH, Stage.DECODE: 2}, routing=routing) as d:
            answers = [await d.chat() for _ in range(12)]
            drawn.append([(await placements(d, answer))["decode"][0] for answer in answers])
    assert drawn[0] == drawn[1] != drawn[2]


async def test_a_text_request_has_no_encode_placement() -> None:
    async with deployed() as d:
        assert set(await placements(d, await d.chat())) == {"prefill", "decode"}
        assert served(d, Stage.ENCODE) == [0]
