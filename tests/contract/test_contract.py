"""What every engine must do, asked over HTTP as clients and the coordinator ask it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.contract.asking import (
    NUM_TOKENS,
    Expectation,
    SimulatedWords,
    Transformers,
    pictures,
    request,
    streamed,
    whole,
)
from tests.e2e.cluster import Cluster
from tests.e2e.pictures import picture

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expectation(engine: str, checkpoint: Path) -> Expectation:
    return SimulatedWords() if engine == "sim" else Transformers(checkpoint)


@pytest.mark.parametrize("num_images", [0, 1, 2, 4])
def test_greedy_answers_are_as_expected_whole_and_streamed(
    client: openai.OpenAI, expectation: Expectation, num_images: int
) -> None:
    images = pictures(num_images)
    expected = expectation.answer(images)
    assert expected.strip()
    assert whole(client, request(images)) == expected
    assert streamed(client, request(images)) == expected


def test_usage_counts_image_tokens(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**request([]))
    seen = client.chat.completions.create(**request([picture(140, 112, seed=0)]))
    # 140 x 112 pixels are 10 x 8 patches of 14, merged by four; the image's two marks come on top.
    assert seen.usage.prompt_tokens - plain.usage.prompt_tokens == 20 + 2
    assert 1 <= seen.usage.completion_tokens <= NUM_TOKENS
    assert seen.choices[0].finish_reason in ("stop", "length")


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    full = whole(client, request(pictures(1)))
    stop = full[len(full) // 2 :][:2]
    assert whole(client, request(pictures(1), stop=[stop])) == full.split(stop)[0]


def test_more_than_one_answer_is_refused_and_not_left_hanging(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="only n = 1"):
        client.chat.completions.create(**request([], n=2))


def test_a_prompt_longer_than_the_context_is_the_clients_fault(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        whole(client, request([], "word " * 20_000))


def test_a_broken_image_fails_its_request_and_no_other(client: openai.OpenAI) -> None:
    broken = request(pictures(1))
    url = broken["messages"][0]["content"][0]["image_url"]
    url["url"] = url["url"][: len(url["url"]) // 2]
    with pytest.raises(openai.BadRequestError):
        whole(client, broken)
    assert whole(client, request(pictures(1)))


def test_workers_speak_sglangs_endpoints(cluster: Cluster) -> None:
    for worker_id, worker in cluster.workers().items():
        assert cluster.get("/health", worker["url"]) is not None, worker_id
        if worker["stage"] == "encode":
            continue
        loads = json.loads(cluster.get("/v1/loads", worker["url"]) or "{}")["loads"]
        assert loads[0]["max_total_num_tokens"] > 0
        models = json.loads(cluster.get("/v1/models", worker["url"]) or "{}")["data"]
        assert models[0]["id"] == "tiny-vl"


@pytest.mark.parametrize("num_images", [0, 4])
def test_a_client_that_leaves_frees_all_and_hurts_nobody(
    cluster: Cluster, client: openai.OpenAI, is_sglang: bool, num_images: int
) -> None:
    num_left = 0
    for wait_s in (0.02, 0.06, 0.12):
        impatient = client.with_options(timeout=wait_s)
        # As long as it gets: the torch engine knows no ignore_eos.
        more = {"extra_body": {"ignore_eos": True}} if is_sglang else {}
        images = pictures(num_images, seed=time.monotonic_ns())
        try:
            whole(impatient, request(images, max_tokens=400, **more))
        except openai.APITimeoutError:
            num_left += 1
    assert num_left
    assert whole(client, request(pictures(1)))
    cluster.wait_until(lambda: not running(cluster), "nothing runs any more", timeout_s=60)


def running(cluster: Cluster) -> dict[str, float]:
    """What is in flight: requests and rooms by the coordinator, requests by each worker."""
    found = {
        worker_id: worker["load"]["num_running_reqs"] + worker["load"]["num_waiting_reqs"]
        for worker_id, worker in cluster.workers().items()
    }
    for key, value in cluster.metrics().items():
        if key in ("epd_requests_in_flight", "epd_rooms_open"):
            found[key] = value
    return {key: value for key, value in found.items() if value}


@pytest.fixture(autouse=True)
def nobody_was_lost(cluster: Cluster) -> Iterator[None]:
    """No test may cost a worker its life."""
    before = {name: worker["epoch"] for name, worker in cluster.workers().items()}
    yield
    assert {name: worker["epoch"] for name, worker in cluster.workers().items()} == before
