"""What happens to a request's body, its media, and requests over the limit or at the end."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import pytest

from epd.clock import FakeClock
from epd.coordinator.media_urls import MediaURLs
from epd.errors import AuthenticationError
from epd.types import Stage
from tests.fakes.deployment import TOKEN, chat_body, data_url, deployed, image_part
from tests.media.images import png

CHAT = "/v1/chat/completions"


async def test_only_our_own_fields_of_the_body_change() -> None:
    picture = png()
    body = {
        "zzz_unknown": {"b": [1, None, True], "a": "ü\u0000\ud800"},
        "temperature": 0.7,
        "seed": 2**62 + 1,
        "logit_bias": {"5": 10**40},
        "top_p": 1e-7,
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "s", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "extra": 1},
                    {
                        "type": "image_url",
                        "image_url": {
                            "detail": "high",
                            "url": data_url(picture),
                            "content_hash": "forged",
                            "k": [],
                        },
                        "more": {},
                    },
                ],
            },
        ],
    }
    async with deployed() as d:
        answer = await d.send(body)
        assert answer.status == 200, answer.body
        (received,) = d.decode.bodies(CHAT)
    for name in ("rid", "bootstrap_room", "bootstrap_host", "bootstrap_port"):
        del received[name]
    image_url = received["messages"][2]["content"][1]["image_url"]
    sent_url = body["messages"][2]["content"][1]["image_url"]  # type: ignore[index]
    assert image_url["content_hash"] == f"sha256:{hashlib.sha256(picture).hexdigest()}"
    assert "/internal/media/" in image_url["url"]
    image_url["url"], image_url["content_hash"] = sent_url["url"], sent_url["content_hash"]
    assert json.dumps(received) == json.dumps(body), "values, types and the order of keys"


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
async def test_the_detail_of_an_image_and_unknown_options_reach_every_stage(
    detail: str | None,
) -> None:
    options = {"detail": detail, "max_long_side_pixel": 448, "x_unknown": {"a": [1]}}
    part = image_part()
    part["image_url"] |= options
    async with deployed() as d:
        assert (await d.chat(part)).status == 200
        (item,) = d.encode.bodies("/encode")[0]["mm_items"]
        seen = [item]
        for worker in (d.prefill, d.decode):
            seen.append(worker.bodies(CHAT)[0]["messages"][0]["content"][0]["image_url"])
    for image_url in seen:
        assert {name: image_url[name] for name in options} == options


async def test_a_detail_that_does_not_exist_is_named() -> None:
    part = image_part()
    part["image_url"]["detail"] = "medium"
    async with deployed() as d:
        answer = await d.chat(part)
        assert answer.status == 400
        assert answer.error["param"] == "messages[0].content[0].image_url.detail"
        assert "'auto', 'low' or 'high'" in answer.error["message"]


async def test_no_base64_travels_further_than_the_coordinator() -> None:
    async with deployed() as d:
        part = image_part()
        encoded = part["image_url"]["url"].partition(",")[2]
        await d.chat(part)
        for worker in d.fleet.workers.values():
            assert encoded not in json.dumps(worker.received)


@pytest.mark.parametrize(
    "field",
    [
        "rid",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "return_token_ids",
        "continue_from",
    ],
)
async def test_a_client_may_not_steer_workers(field: str) -> None:
    async with deployed() as d:
        answer = await d.chat(**{field: 7})
        assert (answer.status, answer.error["param"]) == (400, field)
        assert d.decode.received == d.prefill.received == []


async def test_requests_over_the_limit_are_refused_at_once_and_unread() -> None:
    async with deployed(requests={"max_in_flight": 2}) as d:
        d.decode.faults.hold = release = asyncio.Event()
        running = [asyncio.create_task(d.chat()) for _ in range(2)]
        await d.fleet.until(lambda: len(d.decode.received) == 2)
        refused = await d.send(b"not even json")
        assert refused.status == 503
        assert refused.error["code"] == "overloaded"
        assert refused.headers["Retry-After"] == "1"
        release.set()
        assert [(await task).status for task in running] == [200, 200]
        assert (await d.chat()).status == 200
        metrics = await d.metrics()
        assert metrics["epd_requests_total[('outcome', 'failed'), ('status', '503')]"] == 1
        assert metrics["epd_requests_total[('outcome', 'finished'), ('status', '200')]"] == 3


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async with deployed() as d:
        d.decode.faults.hold = release = asyncio.Event()
        d.encode.faults.hold = encode = asyncio.Event()
        running = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: d.decode.received and d.encode.received)
        draining = asyncio.create_task(d.coordinator.drain(5.0))
        await asyncio.sleep(0)
        refused = await d.chat()
        assert refused.status == 503
        assert "shutting down" in refused.error["message"]
        assert "Retry-After" in refused.headers
        assert (await d.request("GET", "/ready")).status == 503
        assert (await d.request("GET", "/health")).status == 200
        encode.set()  # the image is still encoded, over the slots
        release.set()
        assert (await running).status == 200
        await draining


async def test_what_does_not_finish_while_draining_is_failed_and_aborted() -> None:
    async with deployed() as d:
        d.decode.faults.hold, d.decode.faults.hold_after = asyncio.Event(), 1
        running = asyncio.create_task(d.chat(stream=True))
        await d.fleet.until(lambda: d.decode.num_held)
        await d.coordinator.drain(0.05)
        assert d.decode.aborted, "acknowledged before the coordinator ends"
        answer = await running
        assert "shutting down" in json.loads(answer.events[-1])["error"]["message"]


async def test_media_are_pinned_while_their_request_runs_and_kept_afterwards() -> None:
    async with deployed() as d:
        d.decode.faults.hold = release = asyncio.Event()
        running = asyncio.create_task(d.chat(image_part()))
        await d.fleet.until(lambda: d.decode.received)
        assert d.coordinator.media_cache.pinned_bytes > 0
        release.set()
        await running
        await d.settle()
        assert d.coordinator.media_cache.pinned_bytes == 0
        assert d.coordinator.media_cache.num_items == 1


async def test_a_client_that_leaves_during_the_fetch_leaves_nothing_behind() -> None:
    async with deployed(media={"allow_private_addresses": True}) as d:
        asked = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            running = asyncio.create_task(d.chat(image_part(f"http://127.0.0.1:{port}/x.png")))
            await asked.wait()
            running.cancel()
            await d.settle()
        assert (await d.last_record())["outcome"] == "aborted"
        assert d.prefill.received == d.decode.received == []


async def test_a_client_that_leaves_while_uploading_is_an_abort(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployed() as d:
        port = int(d.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        while not (await d.metrics())["epd_requests_in_flight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        writer.transport.abort()
        await d.settle()
        assert (await d.last_record())["outcome"] == "aborted"
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_spans_reported_by_workers_become_a_timeline_and_metrics() -> None:
    async with deployed() as d:
        answer = await d.chat(image_part())
        rid = answer.headers["x-epd-request-id"]

        def span(name: str, **fields: Any) -> dict[str, Any]:
            return {"request_id": rid, "name": name, "start_unix_s": 1, "duration_s": 2, **fields}

        await d.prefill.register(
            spans=[span("prefill", num_tokens=7), span("kv_handoff", nbytes=640)]
        )
        await d.decode.register(spans=[span("decode", num_tokens=5)])
        record = await d.record(answer)
        names = {s["name"]: s["worker_id"] for s in record["spans"]}
        assert names == {
            "fetch": "coordinator",
            "prefill": "prefill-0",
            "kv_handoff": "prefill-0",
            "decode": "decode-0",
        }
        assert (record["num_prompt_tokens"], record["num_output_tokens"]) == (7, 5)
        assert record["tpot_s"] == 0.5
        metrics = await d.metrics()
        assert metrics["epd_handoff_bytes_total[('step', 'kv_handoff')]"] == 640
        assert metrics["epd_time_per_output_token_seconds_sum"] == 0.5
        assert metrics["epd_image_tokens_total"] == record["num_image_tokens"] > 0


async def test_an_image_of_an_extreme_shape_is_counted_not_crashed_on() -> None:
    async with deployed() as d:
        answer = await d.chat(image_part(data_url(png(1, 5000))), image_part(data_url(png(1, 1))))
        assert answer.status in (200, 400), answer.body
        if answer.status == 400:
            assert answer.error["param"] == "messages[0].content[0].image_url.url"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def urls(clock: FakeClock) -> MediaURLs:
    return MediaURLs("http://c", TOKEN, clock, ttl_s=60)


def parts(url: str) -> tuple[str, str, str]:
    path, _, query = url.partition("?")
    fields = dict(field.split("=") for field in query.split("&"))
    return path.rpartition("/")[2], fields["expires"], fields["signature"]


def test_a_media_url_is_good_until_it_expires(urls: MediaURLs, clock: FakeClock) -> None:
    signed = parts(urls.sign("a" * 64))
    urls.check(*signed)
    clock.advance(60)
    urls.check(*signed)
    clock.advance(1)
    with pytest.raises(AuthenticationError, match="expired"):
        urls.check(*signed)


@pytest.mark.parametrize(
    "forgery",
    [
        lambda h, e, s: ("b" * 64, e, s),
        lambda h, e, s: (h, str(int(e) + 1), s),
        lambda h, e, s: (h, e, s[:-1]),
        lambda h, e, s: (h, e, ""),
        lambda h, e, s: (h, "", s),
        lambda h, e, s: (h, "-1", s),
        lambda h, e, s: (h, "٣", s),
        lambda h, e, s: (h, "9" * 5000, s),
        lambda h, e, s: (h, e, "\udcff"),
    ],
)
def test_a_media_url_that_was_tampered_with_is_refused(urls: MediaURLs, forgery: Any) -> None:
    with pytest.raises(AuthenticationError, match="not signed"):
        urls.check(*forgery(*parts(urls.sign("a" * 64))))


async def test_workers_fetch_media_under_a_signed_url_only() -> None:
    clock = FakeClock()
    picture = png()
    async with deployed(clock=clock) as d:
        assert (await d.chat(image_part(data_url(picture)))).status == 200
        url = d.encode.bodies("/encode")[0]["mm_items"][0]["url"].removeprefix(d.url)
        good = await d.request("GET", url)
        assert (good.status, good.body) == (200, picture)
        assert good.headers["Content-Type"] == "image/png"
        bare = await d.request("GET", url.partition("?")[0], headers=TOKEN.headers)
        assert bare.status == 401
        unknown = d.coordinator.media_urls.sign("0" * 64).removeprefix(d.url)
        assert (await d.request("GET", unknown)).error["code"] == "invalid_image"
        clock.advance(3600)
        assert (await d.request("GET", url)).status == 401


async def test_a_large_picture_is_handled_without_copies_in_the_body() -> None:
    async with deployed() as d:
        picture = png(900, 900)
        assert len(base64.b64encode(picture)) > 2**20
        assert (await d.chat(image_part(data_url(picture)))).status == 200
        assert len(json.dumps(d.prefill.received)) < 2000


async def test_load_is_spread_by_tokens_over_prefill_workers() -> None:
    async with deployed(workers={Stage.ENCODE: 1, Stage.PREFILL: 2, Stage.DECODE: 1}) as d:
        d.decode.faults.hold = release = asyncio.Event()
        long = {**chat_body(), "messages": [{"role": "user", "content": "x" * 10_000}]}
        running = [asyncio.create_task(d.send(long))]
        await d.fleet.until(lambda: d.decode.received)
        for count in range(2, 5):
            running.append(asyncio.create_task(d.chat()))
            await d.fleet.until(lambda count=count: len(d.decode.received) == count)
        loads = sorted(len(worker.received) for worker in d.fleet.of(Stage.PREFILL))
        assert loads == [1, 3]
        release.set()
        await asyncio.gather(*running)


async def test_images_that_fill_the_context_are_refused_before_any_is_encoded() -> None:
    async with deployed() as d:
        part = image_part(data_url(png(280, 280)))  # 100 tokens, of a context of 1000
        answer = await d.chat(*[part] * 10)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "messages"
        assert not d.prefill.received
        assert not d.decode.received
