"""The real `openai` client, unchanged, against the whole path."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.pictures import encoded, picture, user

pytestmark = pytest.mark.cluster

MESSAGES = [
    {"role": "system", "content": "You look at pictures."},
    user(encoded(picture(84, 112)), "What is this?"),
]


def options(max_tokens: int = 12, **more: object) -> dict[str, object]:
    return {
        "model": "random-vl",
        "messages": MESSAGES,
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
def async_client(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def test_a_whole_answer_has_openais_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**options())  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**options())  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            **options(stream=True, stream_options={"include_usage": True})
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )


async def test_the_async_client_streams_and_answers(async_client: openai.AsyncOpenAI) -> None:
    async with async_client:
        whole = await async_client.chat.completions.create(**options())  # type: ignore[call-overload]
        stream = await async_client.chat.completions.create(  # type: ignore[call-overload]
            **options(stream=True)
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == whole.choices[0].message.content


async def test_concurrent_requests_get_the_answers_they_get_alone(
    async_client: openai.AsyncOpenAI,
) -> None:
    async with async_client:
        requests = [
            {
                "model": "random-vl",
                "messages": [user(encoded(picture(56 + 28 * i, 84, i)), f"Number {i}?")],
                "max_tokens": 10,
                "temperature": 0,
            }
            for i in range(8)
        ]

        async def ask(request: dict[str, object]) -> str | None:
            answer = await async_client.chat.completions.create(**request)  # type: ignore[call-overload]
            return answer.choices[0].message.content

        alone = [await ask(request) for request in requests]
        together = await asyncio.gather(*map(ask, requests))
    assert together == alone
    assert len(set(alone)) > 1


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            **options(temperature=1.5, seed=seed, max_tokens=16)
        )
        return str(answer.choices[0].message.content)

    first = sample(7)
    assert sample(7) == first
    assert any(sample(seed) != first for seed in range(8, 12))


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**options())  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**options(stop=stop))  # type: ignore[call-overload]
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_models_lists_what_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["random-vl"]


def test_an_unknown_model_is_the_clients_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)  # type: ignore[arg-type]
    assert caught.value.param == "model"
    assert "random-vl" in caught.value.message
