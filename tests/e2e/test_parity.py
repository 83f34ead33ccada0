"""Greedy answers of the three processes are token-identical to transformers' `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.pictures import data_url, encoded
from tests.reference import CASES, NUM_TOKENS, Case, Reference

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl"])
def family_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from epd.engines.torch.tiny import write_random_checkpoint

    path = tmp_path_factory.mktemp(request.param) / request.param
    write_random_checkpoint(path, request.param, seed=1)
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, family_checkpoint: Path) -> Iterator[Cluster]:
    # Chunks shorter than the prompts, so that chunked prefill is part of the proof.
    options = ("--threads", "1", "--chunk-tokens", "16")
    cluster = Cluster(
        tmp_path_factory.mktemp("parity"), str(family_checkpoint), worker_options=options
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def expected(family_checkpoint: Path) -> dict[str, tuple[str, int]]:
    """Text and token count of transformers' answer to each case."""
    reference = Reference(family_checkpoint)
    eos = reference.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    answers = {}
    for name, case in CASES.items():
        tokens = reference.generate(case)
        ends = [i for i, token in enumerate(tokens) if token in eos]
        num_tokens = ends[0] + 1 if ends else len(tokens)
        text = reference.tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)
        answers[name] = (text, num_tokens)
    return answers


def request_of(case: Case, model: str) -> dict[str, Any]:
    """The case as a client sends it, its pictures as data URLs."""
    pictures = iter(case.images)
    messages = []
    for message in case.messages:
        content = message["content"]
        if isinstance(content, list):
            content = [
                part
                if part["type"] == "text"
                else {
                    "type": "image_url",
                    "image_url": {"url": data_url(encoded(next(pictures)))},
                }
                for part in content
            ]
        messages.append({**message, "content": content})
    return {"model": model, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}


async def answer(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[str, int]:
    reply = await client.chat.completions.create(**request)
    return str(reply.choices[0].message.content), int(reply.usage.completion_tokens)


async def test_each_conversation_and_all_eight_at_once_equal_transformers(
    cluster: Cluster, family_checkpoint: Path, expected: dict[str, tuple[str, int]]
) -> None:
    requests = {name: request_of(case, family_checkpoint.name) for name, case in CASES.items()}
    assert len(requests) == 8
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="-") as client:
        alone = {name: await answer(client, request) for name, request in requests.items()}
        assert alone == expected
        together = await asyncio.gather(*(answer(client, r) for r in requests.values()))
        assert dict(zip(requests, together, strict=True)) == expected
    assert len({text for text, _ in expected.values()}) == len(expected)
