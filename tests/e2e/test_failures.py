"""Workers that die, hang and come back: the client is told at once, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.pictures import encoded, picture, user

pytestmark = pytest.mark.cluster

STAGES = ("encode", "prefill", "decode")
LONG_TOKENS = 1000
"""Tokens of an answer that is still streaming while a test does its harm."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Cluster]:
    """A deployment of this module's own, since its tests break it; its answers never end early."""
    root = tmp_path_factory.mktemp("failures")
    endless = root / checkpoint.name
    shutil.copytree(checkpoint, endless)
    generation = json.loads((endless / "generation_config.json").read_text())
    (endless / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": []}))
    cluster = Cluster(
        root,
        str(endless),
        {"lease": {"heartbeat_s": 0.5, "lease_s": 3.0}},
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, max_tokens: int = 3, **more: object) -> object:
    """A question about a picture that no worker has seen."""
    seed = time.monotonic_ns()
    return client.chat.completions.create(  # type: ignore[call-overload]
        model="random-vl",
        messages=[user(encoded(picture(84, 84, seed)), "What?")],
        max_tokens=max_tokens,
        temperature=0,
        **more,
    )


def assert_nothing_is_held(cluster: Cluster) -> None:
    """Every gauge of memory, rooms and requests in flight is back at 0, on every process."""

    def held() -> dict[str, float]:
        names = ("epd_rooms_open", "epd_kv_blocks_used", "epd_requests_running")
        found = {}
        for worker_id, worker in cluster.workers().items():
            if worker["state"] != "ready":
                continue
            for key, value in cluster.metrics(worker_id).items():
                name = key.partition("{")[0]
                if value and (name in names or name == "epd_arena_pinned_bytes"):
                    found[f"{worker_id}: {key}"] = value
        for key, value in cluster.metrics().items():
            if value and "in_flight" in key:
                found[f"coordinator: {key}"] = value
        return found

    deadline_s = time.monotonic() + 20
    while (still := held()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert still == {}


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_killed_mid_request_fails_it_at_once_and_the_next_succeeds(
    cluster: Cluster, client: openai.OpenAI, stage: str
) -> None:
    # Frozen first, so that the request is certainly in this stage when the worker dies.
    cluster.processes[stage].popen.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, client)
        cluster.wait_until(lambda: cluster.workers()[stage]["num_in_flight"] == 1, "in flight")
        cluster.processes[stage].stop(signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(openai.APIStatusError) as caught:
            pending.result()
    assert time.monotonic() - began_s < 2.0
    assert caught.value.status_code == 502
    assert stage in caught.value.message
    assert_refused_at_once(cluster, client, stage)
    cluster.replace_worker(stage)
    assert ask(client).usage.completion_tokens >= 1  # type: ignore[attr-defined]
    assert_nothing_is_held(cluster)


def test_decode_killed_mid_stream_ends_the_stream_with_an_error(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    chunks = iter(ask(client, LONG_TOKENS, stream=True))  # type: ignore[call-overload]
    next(chunks)
    cluster.processes["decode"].popen.send_signal(signal.SIGSTOP)
    cluster.processes["decode"].stop(signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(openai.APIError) as caught:
        list(chunks)
    assert time.monotonic() - began_s < 2.0
    assert "decode" in caught.value.message
    cluster.replace_worker("decode")
    assert_nothing_is_held(cluster)


@pytest.mark.parametrize("stage", ["encode", "prefill"])
def test_a_stream_outlives_the_workers_it_no_longer_needs(
    cluster: Cluster, client: openai.OpenAI, stage: str
) -> None:
    chunks = iter(ask(client, LONG_TOKENS, stream=True))  # type: ignore[call-overload]
    next(chunks)
    cluster.processes[stage].stop(signal.SIGKILL)
    assert list(chunks)[-1].choices[0].finish_reason in ("stop", "length")
    cluster.replace_worker(stage)


def assert_refused_at_once(cluster: Cluster, client: openai.OpenAI, stage: str) -> None:
    cluster.wait_until(
        lambda: cluster.workers()[stage]["state"] in ("suspect", "lost"), f"{stage} gone"
    )
    began_s = time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client)
    assert time.monotonic() - began_s < 1.0
    assert refused.value.status_code == 503
    assert stage in refused.value.message


def test_a_text_request_needs_no_encode_worker(cluster: Cluster, client: openai.OpenAI) -> None:
    cluster.processes["encode"].stop()
    cluster.wait_until(lambda: "encode" not in cluster.workers(), "encode worker left")
    answer = client.chat.completions.create(
        model="random-vl", messages=[{"role": "user", "content": "hello"}], max_tokens=2
    )
    assert answer.choices[0].finish_reason
    cluster.replace_worker("encode")


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_worker_ends_the_request_when_its_lease_lapses(
    cluster: Cluster, client: openai.OpenAI, stage: str
) -> None:
    cluster.processes[stage].popen.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client)
        assert stage in caught.value.message
        assert time.monotonic() - began_s < 3.0 + 5.0
    finally:
        cluster.processes[stage].popen.send_signal(signal.SIGCONT)
    cluster.wait_until(lambda: cluster.get("/ready") is not None, "the thawed worker is back")
    assert ask(client).usage.completion_tokens >= 1  # type: ignore[attr-defined]
    assert_nothing_is_held(cluster)


def test_a_client_that_leaves_frees_every_stage(cluster: Cluster, client: openai.OpenAI) -> None:
    stream = ask(client, LONG_TOKENS, stream=True)
    next(iter(stream))  # type: ignore[call-overload]
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_is_held(cluster)


def test_a_restarted_coordinator_learns_the_workers_back(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    epochs = {w["worker_id"]: w["epoch"] for w in cluster.workers().values()}
    cluster.processes["coordinator"].stop(signal.SIGKILL)
    cluster.start_coordinator()
    cluster.wait_ready()
    assert {w["worker_id"]: w["epoch"] for w in cluster.workers().values()} == epochs
    assert ask(client).usage.completion_tokens >= 1  # type: ignore[attr-defined]


def test_sigterm_lets_a_worker_finish_what_runs(cluster: Cluster, client: openai.OpenAI) -> None:
    stream = ask(client, LONG_TOKENS, stream=True, stream_options={"include_usage": True})
    chunks = iter(stream)  # type: ignore[call-overload]
    next(chunks)
    cluster.processes["decode"].popen.send_signal(signal.SIGTERM)
    cluster.wait_until(
        lambda: cluster.workers().get("decode", {"state": "gone"})["state"] != "ready", "draining"
    )
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client)
    assert "decode" in refused.value.message
    rest = list(chunks)
    assert rest[-1].usage.completion_tokens == LONG_TOKENS
    assert cluster.processes["decode"].popen.wait(30) == 0
    cluster.wait_until(lambda: "decode" not in cluster.workers(), "decode left the registry")
    cluster.replace_worker("decode")
