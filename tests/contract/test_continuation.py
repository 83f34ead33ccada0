"""What engines that say `can_continue` must do with a stream that was broken off.

Asked of the workers themselves, as the coordinator asks them.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import aiohttp
import openai
import pytest
from yarl import URL

from tests.contract.asking import request, whole
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOMS = count(1)


@pytest.fixture(autouse=True)
def all_can_continue(cluster: Cluster) -> None:
    workers = cluster.workers()
    if not all(workers[name]["can_continue"] for name in ("prefill", "decode")):
        pytest.skip("this engine does not continue answers")


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1, "seed": 3}, {"max_tokens": 5}, {"stop": ["e", "7"]}],
    ids=["greedy", "sampled", "short", "stopped"],
)
def test_a_stream_broken_off_after_any_chunk_goes_on_with_the_very_next(
    cluster: Cluster, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    unbroken = ask(cluster, **fields)
    assert unbroken[-1] == "[DONE]"
    assert text_of(unbroken) == whole(client, request([], **fields))
    token_ids = told(unbroken)
    assert unbroken[-2]["usage"]["completion_tokens"] == len(token_ids) > 0
    for num_sent in range(1, len(unbroken) - 2):
        sent = unbroken[:num_sent]
        begun = {"token_ids": told(sent), "id": sent[0]["id"], "created": sent[0]["created"]}
        assert ask(cluster, continue_from=begun, **fields) == unbroken[num_sent:]
    assert not text_of(unbroken[-3:]), "the last cut is after all of the text"


def test_tokens_that_are_none_are_refused_by_name(cluster: Cluster) -> None:
    for token_ids in ("1", [1.5], [-1], [2**31]):
        answer = ask(cluster, continue_from={"token_ids": token_ids})
        assert answer["error"]["param"].startswith("continue_from.token_ids")
        assert answer["error"]["type"] == "invalid_request_error"


def ask(cluster: Cluster, **fields: Any) -> Any:
    """The events of a stream, or the document that was answered instead."""
    workers = cluster.workers()
    prefill, decode = URL(workers["prefill"]["url"]), URL(workers["decode"]["url"])
    room = next(ROOMS)
    body = request(
        [],
        rid=f"continued-{room}",
        bootstrap_room=room,
        bootstrap_host=prefill.host,
        bootstrap_port=prefill.port,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
        **fields,
    )

    async def post(session: aiohttp.ClientSession, worker: URL) -> Any:
        async with session.post(worker / "v1/chat/completions", json=body) as response:
            text = await response.text()
        if response.content_type != "text/event-stream":
            return json.loads(text)
        payloads = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
        return [p if p == "[DONE]" else json.loads(p) for p in payloads]

    async def both() -> Any:
        async with aiohttp.ClientSession(headers=cluster.headers) as session:
            return (await asyncio.gather(post(session, decode), post(session, prefill)))[0]

    return asyncio.run(both())


def told(chunks: list[Any]) -> list[int]:
    choices = [c["choices"][0] for c in chunks if c != "[DONE]" and c["choices"]]
    return [token_id for choice in choices for token_id in choice["token_ids"]]


def text_of(chunks: list[Any]) -> str:
    choices = [c["choices"][0] for c in chunks if c != "[DONE]" and c["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)
