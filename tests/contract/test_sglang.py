"""What only the real SGLang can show: its full API through ours, and its deaths."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.contract.asking import pictures, request, whole
from tests.contract.conftest import ENGINES, wait_all_ready
from tests.contract.test_contract import running
from tests.e2e.cluster import Cluster
from tests.e2e.pictures import encoded, picture

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif("sglang" not in ENGINES, reason="needs SGLang: make test-sglang"),
]

FORWARDS = "sglang:encoder_model_forward_seconds_count"


def forwards(cluster: Cluster) -> dict[str, float]:
    """Runs of the vision tower, by encode worker."""
    found = {}
    for worker_id in ("encode-0", "encode-1"):
        samples = cluster.metrics(worker_id)
        found[worker_id] = sum(v for k, v in samples.items() if k.startswith(FORWARDS))
    return found


def ask_many(client: openai.OpenAI, seeds: list[int], at_once: int = 8) -> list[str]:
    def ask(seed: int) -> str:
        return whole(client, request([picture(84, 84, seed)], max_tokens=4))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, seeds))


def server_pid(cluster: Cluster, worker_id: str) -> int:
    """The SGLang server that a worker supervises."""
    pid = cluster.workers()[worker_id]["pid"]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}, "max_tokens": 64},
        {"extra_body": {"ignore_eos": True, "min_tokens": 16}},
        {"extra_body": {"top_k": 5, "repetition_penalty": 1.1}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"seed": 7, "temperature": 0.7, "presence_penalty": 0.5},
    ],
    ids=lambda fields: "+".join(fields.get("extra_body", fields)),
)
def test_fields_reach_sglang_and_its_answers_come_back(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    choice = client.chat.completions.create(**request(pictures(1), **fields)).choices[0]
    assert choice.message.content
    if "logprobs" in fields:
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    if "ignore_eos" in fields.get("extra_body", {}):
        assert choice.finish_reason == "length"
    if "response_format" in fields and choice.finish_reason == "stop":
        json.loads(choice.message.content)


def test_tools_are_offered_to_the_model(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    plain = client.chat.completions.create(**request(pictures(1)))
    answer = client.chat.completions.create(**request(pictures(1), tools=[tool]))
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert plain.choices[0].message.content


def test_an_image_that_only_its_decoder_can_refuse_costs_nobody_else_anything(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    """SGLang 0.5.23 by itself loses the whole prefill server here: see `corrections`."""
    data = bytearray(encoded(picture(84, 84, 1)))
    start = data.index(b"IDAT") + 8
    data[start : start + 24] = b"\xff" * 24
    broken = request([picture(84, 84, 1)])
    import base64

    url = "data:image/png;base64," + base64.b64encode(bytes(data)).decode()
    broken["messages"][0]["content"][0]["image_url"]["url"] = url
    began_s = time.monotonic()
    with pytest.raises(openai.APIStatusError):
        whole(client, broken)
    assert time.monotonic() - began_s < 10
    assert whole(client, request(pictures(1)))
    cluster.wait_until(lambda: not running(cluster), "nothing runs any more")


def test_each_distinct_image_is_encoded_once_over_two_encoders(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    before = forwards(cluster)
    seeds = [1000 + i % 10 for i in range(40)]
    answers = ask_many(client, seeds)
    assert all(answers)
    assert all(answers[i] == answers[i % 10] for i in range(40))
    after = forwards(cluster)
    counts = [after[name] - before[name] for name in after]
    assert sum(counts) == 10
    assert min(counts) >= 3, "both encoders take part"


@pytest.mark.parametrize("frozen_first", [False, True])
def test_an_encoder_killed_in_the_middle_fails_no_request(
    cluster: Cluster, client: openai.OpenAI, frozen_first: bool
) -> None:
    pid = server_pid(cluster, "encode-0")
    if frozen_first:
        os.kill(pid, signal.SIGSTOP)  # So that it certainly holds parts when it dies.
    killer = threading.Timer(1.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    answers = ask_many(client, [2000 + 100 * frozen_first + i for i in range(40)])
    killer.join()
    assert len(answers) == 40
    assert all(answers)
    wait_all_ready(cluster, 4)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_dead_server_ends_its_requests_within_3_s_and_comes_back(
    cluster: Cluster, client: openai.OpenAI, stage: str
) -> None:
    pid = server_pid(cluster, stage)
    ended_s: list[float] = []

    def ask() -> None:
        body = request([picture(84, 84, 3000)], max_tokens=1500)
        try:
            whole(client, {**body, "extra_body": {"ignore_eos": True}})
        except openai.APIStatusError as error:
            assert error.status_code in (502, 503, 504)
        ended_s.append(time.monotonic())

    if stage == "prefill":
        os.kill(pid, signal.SIGSTOP)  # Or it would be done before it dies.
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.0)
    assert not ended_s
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    asking.join()
    assert ended_s[0] - killed_s < 3
    wait_all_ready(cluster, 4)
    assert whole(client, request(pictures(2)))
    cluster.wait_until(lambda: not running(cluster), "no room or request is left")


@pytest.fixture(scope="module", autouse=True)
def servers_end_with_their_workers(cluster: Cluster) -> Iterator[None]:
    yield
    pid = server_pid(cluster, "encode-1")
    worker = cluster.processes["encode-1"]
    worker.popen.kill()
    worker.popen.wait(10)
    cluster.wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the server of a killed worker")
