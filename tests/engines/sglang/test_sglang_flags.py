from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd.config import WorkerConfig, build
from epd.config.load import OPTIONS
from epd.engines.sglang.environment import (
    WORKER_VARIABLE,
    compose_environment,
    encode_window,
    visible_gpus,
)
from epd.engines.sglang.flags import OWNED, Ports, compose, flag_names
from epd.errors import ConfigError

PORTS = Ports(http=20_001, bootstrap=20_002, encoders=20_003)
SLOTS = ["http://c:8000/internal/encoders/x/0", "http://c:8000/internal/encoders/x/1"]


def worker(stage: str, **fields: Any) -> WorkerConfig:
    values = {"stage": stage, "model": "m", "engine": "sglang", **fields}
    return build(WorkerConfig, values, source=OPTIONS)


def flags(stage: str, **fields: Any) -> list[str]:
    config = worker(stage, **fields)
    return compose(config, model="/m", served_name="m", ports=PORTS, encoder_urls=SLOTS)


def environment_of(config: WorkerConfig, inherited: dict[str, str]) -> dict[str, str]:
    return compose_environment(config, inherited, metrics_folder=Path("/metrics"))


def value(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_each_role_gets_its_flags() -> None:
    encode, prefill, decode = (flags(stage) for stage in ("encode", "prefill", "decode"))
    for argv in (encode, prefill, decode):
        assert value(argv, "--model-path") == "/m"
        assert value(argv, "--served-model-name") == "m"
        assert value(argv, "--port") == "20001"
    assert "--encoder-only" in encode
    assert "--language-only" not in encode
    assert value(encode, "--encoder-transfer-backend") == "zmq_to_scheduler"
    assert value(prefill, "--disaggregation-mode") == "prefill"
    assert value(prefill, "--disaggregation-bootstrap-port") == "20002"
    start = prefill.index("--encoder-urls")
    assert prefill[start + 1 : start + 3] == SLOTS
    assert value(prefill, "--encoder-bootstrap-port") == "20003"
    assert value(decode, "--disaggregation-mode") == "decode"


def test_decode_holds_no_vision_weights_and_knows_no_encoders() -> None:
    """With encoder URLs, decode would have every image encoded a second time."""
    argv = flags("decode")
    assert "--language-only" in argv
    assert "--encoder-urls" not in argv


def test_rdma_and_mooncake_embeddings_are_composed() -> None:
    fields = {"gpus": "0", "transfer_protocol": "rdma", "transfer_device": "mlx5_0"}
    argv = flags("prefill", embedding_transport="mooncake", **fields)
    assert value(argv, "--disaggregation-transfer-backend") == "mooncake"
    assert value(argv, "--disaggregation-ib-device") == "mlx5_0"
    assert value(argv, "--encoder-transfer-backend") == "mooncake"
    assert "--device" not in argv
    assert value(flags("prefill"), "--disaggregation-transfer-backend") == "mooncake_tcp"


def test_parallelism_memory_and_limits_are_composed_only_where_said() -> None:
    argv = flags("prefill", gpus="0,1,2,3", tp=2, pp=2, mem_fraction=0.8, chunk_tokens=4096)
    assert (value(argv, "--tp-size"), value(argv, "--pp-size")) == ("2", "2")
    assert "--dp-size" not in argv
    assert value(argv, "--mem-fraction-static") == "0.8"
    assert value(argv, "--chunked-prefill-size") == "4096"
    quiet = flag_names(flags("decode"))
    for name in ("--tp-size", "--max-running-requests", "--chunked-prefill-size"):
        assert name not in quiet


def test_a_users_flag_replaces_a_default_and_comes_last() -> None:
    argv = flags("prefill", sglang_flags="--dtype bfloat16 --schedule-policy lpm")
    assert argv.count("--dtype") == 1
    assert argv[-4:] == ["--dtype", "bfloat16", "--schedule-policy", "lpm"]


@pytest.mark.parametrize("name", sorted(OWNED))
def test_a_flag_that_epd_composes_is_refused_with_the_option_to_use(name: str) -> None:
    for spelling in (f"{name} 1", f"{name}=1"):
        with pytest.raises(ConfigError, match=OWNED[name]):
            flags("prefill", sglang_flags=spelling)


@pytest.mark.parametrize(
    ("stage", "fields", "words"),
    [
        ("decode", {"kv_bytes": 2**30}, "kv_bytes is a setting of the torch engine"),
        ("encode", {"gpus": "0", "device": "cuda:1"}, "both name GPUs"),
        ("prefill", {"transfer_protocol": "rdma"}, "rdma needs GPUs"),
        ("prefill", {"tp": 2}, "need GPUs"),
        ("prefill", {"kv_tier": "host"}, "does not run on a CPU"),
        ("prefill", {"gpus": "0", "transfer_device": "mlx5_0"}, "transfer_protocol rdma"),
        ("encode", {"kv_tier": "host", "gpus": "0"}, "an encode worker holds no KV cache"),
        ("encode", {"gpus": "0,1", "pp": 2}, "an encoder has no pipeline"),
        (
            "prefill",
            {"sglang_flags": "--enable-pd-role-switch"},
            "needs --disable-radix-cache",
        ),
        (
            "prefill",
            {"gpus": "0,1", "pp": 2, "sglang_flags": "--enable-pd-role-switch"},
            "without pp",
        ),
    ],
)
def test_a_contradiction_is_refused_with_a_sentence(
    stage: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        flags(stage, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": "0,1"}, "names 2 GPUs, but tp 1, dp 1, pp 1 need 1"),
        ({"gpus": "0,0", "tp": 2}, "names one GPU twice"),
        ({"kv_tier": "file"}, "needs kv_tier_path"),
        ({"kv_tier": "mooncake"}, "kv_tier mooncake needs kv_tier_master"),
        ({"embedding_cache": "global"}, "embedding_cache global needs kv_tier_master"),
        ({"kv_tier_gb": 8}, "need a kv_tier"),
    ],
)
def test_settings_that_cannot_be_are_refused_when_read(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker("prefill", **fields)


def test_attention_replicas_share_the_tensor_groups_gpus() -> None:
    config = worker("decode", gpus="0,1", tp=2, dp=2, sglang_flags="--enable-dp-attention")
    assert config.num_gpus == 2


def test_gpus_become_cuda_visible_devices() -> None:
    assert visible_gpus(worker("decode", gpus="2,3", tp=2)) == "2,3"
    assert visible_gpus(worker("decode", device="cuda:1")) == "1"
    assert visible_gpus(worker("decode", device="cuda")) == ""
    environment = environment_of(worker("decode", gpus="2,3", tp=2), {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_no_wait_inside_sglang_is_longer_than_ours() -> None:
    environment = environment_of(worker("prefill", request_timeout_s=30), {})
    waits = {name: text for name, text in environment.items() if name.endswith("_TIMEOUT")}
    assert waits
    assert max(int(text) for text in waits.values()) == 30


def test_the_operators_environment_wins() -> None:
    environment = environment_of(worker("prefill"), {"SGLANG_HOST_IP": "10.0.0.1"})
    assert "SGLANG_HOST_IP" not in environment
    assert environment[WORKER_VARIABLE] == "1"


def test_cpu_settings_are_absent_where_gpus_are_named() -> None:
    assert "SGLANG_USE_CPU_ENGINE" in environment_of(worker("encode"), {})
    assert "SGLANG_USE_CPU_ENGINE" not in environment_of(worker("encode", gpus="0"), {})
    assert "torch_native" in flags("encode")
    assert "torch_native" not in flags("encode", gpus="0")


def test_the_prefix_cache_is_fed_one_request_at_a_time() -> None:
    prefix, off = worker("encode"), worker("encode", embedding_cache="off")
    assert "--enable-prefix-mm-cache" in flags("encode")
    assert environment_of(prefix, {})["SGLANG_ENCODER_MAX_BATCH_SIZE"] == "1"
    assert encode_window(prefix) == 2
    assert encode_window(off) == 16


@pytest.mark.parametrize(
    ("tier", "fields", "variables"),
    [
        ("host", {}, {}),
        (
            "file",
            {"kv_tier_path": "/kv"},
            {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(Path("/kv"))},
        ),
        (
            "mooncake",
            {"kv_tier_master": "h:1", "kv_tier_gb": 16},
            {"MOONCAKE_MASTER": "h:1", "MOONCAKE_PROTOCOL": "tcp"},
        ),
    ],
)
def test_the_kv_tier_is_composed_for_both_sides(
    tier: str, fields: dict[str, Any], variables: dict[str, str]
) -> None:
    fields = {"gpus": "0", "kv_tier": tier, **fields}
    prefill = flags("prefill", **fields)
    assert "--enable-hierarchical-cache" in prefill
    assert "--disaggregation-decode-enable-offload-kvcache" in flags("decode", **fields)
    if tier != "host":
        assert value(prefill, "--hicache-storage-backend") == tier
    if "kv_tier_gb" in fields:
        assert value(prefill, "--hicache-size") == "16"
    environment = environment_of(worker("prefill", **fields), {})
    assert variables.items() <= environment.items()
