"""The stages are separate processes, and what passes between them is exactly accounted for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.pictures import encoded, picture, user

pytestmark = pytest.mark.cluster

STAGES = ("encode", "prefill", "decode")


def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def test_the_three_stages_and_the_coordinator_are_separate_processes(cluster: Cluster) -> None:
    workers = cluster.workers()
    pids = {worker["pid"] for worker in workers.values()}
    assert len(pids | {cluster.processes["coordinator"].pid}) == 4
    for stage in STAGES:
        pid = workers[stage]["pid"]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        assert command[command.index("--stage") + 1] == stage
        assert workers[stage]["pid"] == cluster.processes[stage].pid


def test_each_stage_holds_only_its_own_weights(cluster: Cluster, checkpoint: Path) -> None:
    from safetensors import safe_open

    counts = {"vision": 0, "language": 0}
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            part = "vision" if "visual." in name else "language"
            counts[part] += weights.get_tensor(name).numel()
    expected = {"encode": "vision", "prefill": "language", "decode": "language"}
    for stage, part in expected.items():
        info = json.loads(cluster.get("/server_info", cluster.workers()[stage]["url"]) or "{}")
        assert info["num_parameters"] == counts[part], stage


def test_the_coordinator_maps_no_tensor_library(cluster: Cluster) -> None:
    maps = Path(f"/proc/{cluster.processes['coordinator'].pid}/maps").read_text()
    assert not re.search(r"libtorch|mooncake", maps)


def test_metrics_show_exactly_the_bytes_that_mooncake_moved(
    cluster: Cluster, checkpoint: Path
) -> None:
    before = {stage: cluster.metrics(stage) for stage in STAGES}
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    side = processor["patch_size"] * processor["merge_size"]  # pixels of one image token
    images = [encoded(picture(9 * side, 7 * side, seed)) for seed in (71, 72)]
    reply = client(cluster).chat.completions.with_raw_response.create(
        model="random-vl",
        messages=[user(images[0], "and", images[1], "differ?")],  # type: ignore[list-item]
        max_tokens=4,
    )
    timeline = cluster.timeline(reply.headers["x-epd-request-id"])
    usage = reply.parse().usage
    assert usage is not None
    after = {stage: cluster.metrics(stage) for stage in STAGES}

    def moved(stage: str, name: str, role: str) -> float:
        key = f'{name}{{role="{role}"}}'
        return after[stage].get(key, 0) - before[stage].get(key, 0)

    config = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    num_image_tokens = 2 * 9 * 7
    embedding_bytes = num_image_tokens * text["hidden_size"] * 4
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    token_bytes = text["num_hidden_layers"] * 2 * text["num_key_value_heads"] * head_dim * 4
    num_blocks = -(-usage.prompt_tokens // 16)
    kv_bytes = num_blocks * 16 * token_bytes
    assert moved("encode", "epd_embedding_bytes_moved_total", "sent") == embedding_bytes
    assert moved("prefill", "epd_embedding_bytes_moved_total", "received") == embedding_bytes
    assert moved("prefill", "epd_kv_bytes_moved_total", "sent") == kv_bytes
    assert moved("decode", "epd_kv_bytes_moved_total", "received") == kv_bytes
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in timeline["spans"]:
        spans.setdefault(span["name"], []).append(span)
    assert sum(span["nbytes"] for span in spans["embedding_handoff"]) == embedding_bytes
    assert sum(span["nbytes"] for span in spans["kv_handoff"]) == kv_bytes
    assert timeline["num_image_tokens"] == num_image_tokens
    assert timeline["num_prompt_tokens"] == usage.prompt_tokens


def test_a_repeated_image_is_encoded_once(cluster: Cluster) -> None:
    before = cluster.metrics("encode")["epd_encodes_total"]
    image = encoded(picture(84, 84, 99))
    for _ in range(3):
        client(cluster).chat.completions.create(
            model="random-vl",
            messages=[user(image, "what?")],  # type: ignore[list-item]
            max_tokens=2,
        )
    assert cluster.metrics("encode")["epd_encodes_total"] == before + 1
