"""Configuration: what a file and options become, and how their mistakes are told."""

from pathlib import Path

import pytest

from epd.config import (
    CoordinatorConfig,
    DeploymentConfig,
    WorkerConfig,
    build,
    load_coordinator,
    load_deployment,
)
from epd.config.load import OPTIONS
from epd.errors import ConfigError
from epd.types import Stage

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_deployment(write(folder, text))
    message = caught.value.message
    assert "\n" not in message
    return message


def test_an_empty_file_is_the_default_deployment(tmp_path: Path) -> None:
    assert load_deployment(write(tmp_path, "")) == DeploymentConfig()


def test_the_shipped_file_is_valid_and_serves_the_bundled_model() -> None:
    deployment = load_deployment(ROOT / "configs" / "local-cpu.yaml")
    assert deployment.model == "tiny-vl"
    assert [pool.replicas for _, pool in deployment.pools.items()] == [1, 1, 1]


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    text = "pools: {encode: {engine: sglang, worker: {embedding_cache: off, kv_tier: off}}}"
    worker = load_deployment(write(tmp_path, text)).pools.encode.worker
    assert (worker.embedding_cache, worker.kv_tier) == ("off", "off")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modle: x", "unknown key modle; did you mean model?"),
        ("coordinator: {prt: 1}", "unknown key coordinator.prt; did you mean port?"),
        (
            "coordinator: {lease: {leas_s: 1}}",
            "unknown key coordinator.lease.leas_s; did you mean lease_s?",
        ),
        ("pools: {decod: {}}", "unknown key pools.decod; did you mean decode?"),
        (
            "pools: {encode: {worker: {kv_byte: 1}}}",
            "unknown key pools.encode.worker.kv_byte; did you mean kv_bytes?",
        ),
        (
            "pools: {decode: {zzz: 1}}",
            "unknown key pools.decode.zzz; known keys: devices, engine, gpus, replicas, worker",
        ),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest_valid_one(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert error_of(tmp_path, text) == f"{tmp_path}/deployment.yaml: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coordinator: {port: 70000}", "coordinator.port: input should be less than or equal to"),
        ("coordinator: {port: 0}", "coordinator.port: input should be greater than or equal to 1"),
        ("coordinator: {port: x}", "coordinator.port: input should be a valid integer"),
        ("pools: {encode: {worker: {threads: 0}}}", "pools.encode.worker.threads: input should be"),
        ("pools: {encode: {devices: [gpu]}}", "pools.encode.devices.0: 'gpu' is no device"),
        ("pools: {encode: {devices: []}}", "pools.encode.devices: list should have at least 1"),
        ("pools: {encode: {worker: {host: 0.0.0.0}}}", "pools.encode.worker: host 0.0.0.0 needs"),
        (
            "pools: {encode: {gpus: [[0, 1]]}}",
            "pools.encode: gpus gives a replica [0, 1], but its parallelism needs 1 different GPUs",
        ),
        (
            "pools: {encode: {gpus: [[2, 2]], worker: {tp: 2}}}",
            "pools.encode: gpus gives a replica [2, 2], but its parallelism needs 2 different GPUs",
        ),
        ("coordinator: {lease: {lease_s: 1}}", "coordinator.lease: lease_s must be at least twice"),
        ("coordinator: {media: {max_pixels: 0}}", "coordinator.media.max_pixels: input should be"),
        (
            "coordinator: {media: {max_bytes: 100, cache_bytes: 99}}",
            "coordinator.media: cache_bytes (99) must hold at least one image of max_bytes (100)",
        ),
        (
            "coordinator: {requests: {max_body_bytes: 2048, max_in_flight_bytes: 2047}}",
            "coordinator.requests: max_in_flight_bytes (2047) must hold at least one body of "
            "max_body_bytes (2048)",
        ),
        ("coordinator: {advertise: nowhere}", "coordinator.advertise: 'nowhere' is no URL"),
        (
            "coordinator: {advertise: 'http://::1:8000'}",
            "coordinator.advertise: 'http://::1:8000' is no URL of a server: give one such as "
            "http://10.0.0.1:8000 or http://[fd00::1]:8000",
        ),
        ("coordinator: {host: '10.0.0.1:8000'}", "coordinator.host: '10.0.0.1:8000' is no host"),
        ("coordinator: {host: ''}", "coordinator.host: '' is no host"),
        ("coordinator: {host: '0::0', allow_anonymous: true}", "host :: needs advertise"),
        (
            "coordinator: {fleet: [{url: 'http://fd00::1', stage: encode, model: m}]}",
            "coordinator.fleet.0.url: 'http://fd00::1' is no URL of a server",
        ),
        (
            "coordinator: {fleet: [{url: http://h, stage: encode, model: m, bootstrap_port: 0}]}",
            "coordinator.fleet.0.bootstrap_port: input should be greater than or equal to 1",
        ),
        (
            "pools: {decode: {worker: {advertise: 'http://h'}}}",
            "pools.decode.worker.advertise: 'http://h' is no host",
        ),
        (
            "pools: {decode: {worker: {kv_tier_master: '10.0.0.1'}}}",
            "pools.decode.worker.kv_tier_master: '10.0.0.1' is no host:port",
        ),
        ("labels: {zone: 1}", "labels.zone: input should be a valid string"),
        ("labels: [=a]", "labels: '=a' is no label: give NAME=VALUE, as in zone=a"),
        (
            "coordinator: {routing: {encode: afinity}}",
            "coordinator.routing.encode: input should be 'affinity', 'least_loaded'",
        ),
        (
            "coordinator: {routing: {link: {same_rack: 2}}}",
            "coordinator.routing.link: same_node, same_rack, same_zone and elsewhere must not",
        ),
        ("coordinator: 5", "coordinator: input should be a valid dictionary"),
        ("[1, 2]", "expected keys and values, found a list"),
        ("a: [", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read \(No such file"):
        load_deployment(tmp_path / "nope.yaml")


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "coordinator: {port: 9000, encoder_slots: 3}")
    config = load_coordinator(path, port="9001", encoder_slots=None)
    assert (config.port, config.encoder_slots, config.host) == (9001, 3, "127.0.0.1")


def test_an_option_can_mend_what_the_file_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, "coordinator: {host: 10.0.0.7}")
    with pytest.raises(ConfigError, match="set api_keys_file"):
        load_coordinator(path)
    assert load_coordinator(path, allow_anonymous=True).host == "10.0.0.7"


@pytest.mark.parametrize("text", ["coordinator: [1]", "coordinator: 5", "pools: {decod: {}}"])
def test_the_coordinator_checks_the_whole_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_coordinator(write(tmp_path, text), port="9000")


def test_a_wrong_option_is_named_as_it_is_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        build(WorkerConfig, {"stage": "encode", "kv_bytes": "many"}, source=OPTIONS)
    assert caught.value.message == (
        "--kv-bytes: input should be a valid integer, unable to parse string as an integer; "
        "--model is missing"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::"])
def test_an_address_others_reach_needs_keys_or_a_word_that_it_is_meant(host: str) -> None:
    with pytest.raises(ConfigError, match="set api_keys_file, or allow_anonymous: true"):
        build(CoordinatorConfig, {"host": host, "advertise": "http://a:1"}, source=OPTIONS)


def test_listening_everywhere_needs_an_address_that_peers_can_use() -> None:
    with pytest.raises(ConfigError, match="needs advertise"):
        load_coordinator(None, host="0.0.0.0", allow_anonymous=True)
    with pytest.raises(ConfigError, match="needs advertise"):
        fields = {"stage": "encode", "model": "m", "host": "0.0.0.0"}
        build(WorkerConfig, fields, source=OPTIONS)


def test_the_coordinators_url_is_what_peers_can_reach() -> None:
    assert CoordinatorConfig(port=81).url == "http://127.0.0.1:81"
    assert CoordinatorConfig(host="::1", port=81).url == "http://[::1]:81"
    assert CoordinatorConfig(host="[0::1]", port=81).url == "http://[::1]:81"
    assert CoordinatorConfig(advertise="http://epd.example/").url == "http://epd.example"


def test_a_worker_advertises_an_ipv6_address_however_it_is_spelled() -> None:
    fields = {"stage": "encode", "model": "m", "host": "::", "coordinator": "http://[FD00::1]:81/"}
    for advertise in ("fd00::2", "[fd00:0::2]"):
        config = build(WorkerConfig, {**fields, "advertise": advertise}, source=OPTIONS)
        assert config.advertised_host == "fd00::2"
        assert config.coordinator == "http://[fd00::1]:81"


def test_each_replica_of_a_pool_gets_its_device_and_the_pools_fields() -> None:
    deployment = DeploymentConfig.model_validate(
        {
            "model": "m",
            "served_model_name": "name",
            "coordinator": {"port": 81, "token_file": "/t"},
            "pools": {
                "decode": {
                    "replicas": 3,
                    "devices": ["cuda:0", "cuda:1"],
                    "worker": {"kv_bytes": 2**21},
                }
            },
        }
    )
    workers = [deployment.worker(Stage.DECODE, replica) for replica in range(3)]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [worker.worker_id for worker in workers] == ["decode-0", "decode-1", "decode-2"]
    for worker in workers:
        assert worker.kv_bytes == 2**21
        assert worker.coordinator == "http://127.0.0.1:81"
        assert worker.served_model_name == "name"
        assert worker.token_file == Path("/t")
    assert (
        deployment.worker(Stage.ENCODE, 0).kv_bytes
        == WorkerConfig.model_fields["kv_bytes"].get_default()
    )


def test_the_labels_of_a_deployment_are_those_of_all_its_workers(tmp_path: Path) -> None:
    deployment = load_deployment(write(tmp_path, "labels: {zone: a, rack: r=1}"))
    for stage, _ in deployment.pools.items():
        assert deployment.worker(stage, 0).label == {"zone": "a", "rack": "r=1"}


def test_a_label_is_a_name_and_a_value_on_the_command_line_too() -> None:
    options = {"stage": "encode", "model": "m", "label": ["zone=a", "rack=r=1"]}
    config = build(WorkerConfig, options, source=OPTIONS)
    assert config.label == {"zone": "a", "rack": "r=1"}
