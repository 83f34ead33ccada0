"""The real `openai` client against the coordinator and a fake fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from epd.auth import APIKeys
from epd.types import Stage
from tests.fakes.deployment import Deployment, data_url, deployed, image_part
from tests.fakes.fleet import MODEL

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(d: Deployment, key: str = "unused") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{d.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def test_a_whole_answer() -> None:
    async with deployed() as d, client_of(d) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "toktoktok"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


async def test_a_stream_with_and_without_usage() -> None:
    async with deployed() as d, client_of(d) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "toktoktok"
        assert chunks[-1].choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.total_tokens == 8


async def test_an_image() -> None:
    async with deployed() as d, client_of(d) as client:
        content: Any = [image_part(), {"type": "text", "text": "what?"}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}]
        )
        assert answer.choices[0].finish_reason == "stop"
        assert len(d.encode.sent) == 1


async def test_one_model_is_shown_and_another_is_not_found() -> None:
    async with deployed() as d, client_of(d) as client:
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="no ready worker serves 'org/other'"):
            await client.models.retrieve("org/other")


async def test_the_blocking_client() -> None:
    def ask(url: str) -> tuple[str | None, list[str | None], list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            tokens = [chunk.choices[0].delta.content for chunk in stream]
            return whole.choices[0].message.content, tokens, [m.id for m in client.models.list()]

    async with deployed() as d:
        whole, tokens, models = await asyncio.to_thread(ask, d.url)
        assert whole == "toktoktok"
        assert tokens == ["tok", "tok", "tok", None]
        assert models == [MODEL]


async def test_models_are_those_of_ready_workers() -> None:
    async with deployed() as d, client_of(d) as client:
        (model,) = [m async for m in client.models.list()]
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "epd")
        for worker in d.fleet.workers.values():
            await worker.register(state="draining")
        assert [m async for m in client.models.list()] == []


async def test_errors_become_the_clients_own_exceptions() -> None:
    async with deployed() as d, client_of(d) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=MESSAGES, max_tokens=0)
        assert (bad.value.param, bad.value.code) == ("max_tokens", "invalid_request")
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="gpt-9", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        broken: Any = [image_part(data_url(b"no image"))]
        with pytest.raises(openai.BadRequestError) as image:
            await create(model=MODEL, messages=[{"role": "user", "content": broken}])
        assert image.value.param == "messages[0].content[0].image_url.url"
        await d.fleet.of(Stage.DECODE)[0].register(state="draining")
        with pytest.raises(openai.InternalServerError, match="no decode worker") as absent:
            await create(model=MODEL, messages=MESSAGES, stream=True)
        assert absent.value.status_code == 503


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with deployed(api_keys=APIKeys(["right"])) as d:
        async with client_of(d, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        async with client_of(d, "right") as client:
            assert await client.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_a_failure_in_mid_stream_raises_in_the_client() -> None:
    async with deployed() as d, client_of(d) as client:
        d.decode.faults.cut_after = 2
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        tokens: list[str | None] = []
        with pytest.raises(openai.APIError, match="decode worker decode-0 vanished"):
            async for chunk in stream:
                tokens.append(chunk.choices[0].delta.content)
        assert tokens == ["tok", "tok"]
