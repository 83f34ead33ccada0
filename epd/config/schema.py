"""The configuration, field by field. Unknown keys are errors; defaults are stated here once.

Durations are seconds, sizes bytes. `epd up` reads a whole `DeploymentConfig`; `epd coordinator
--config` reads the `coordinator` section of the same file. A field's docstring is its text in
`--help` and in docs/configuration.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from epd.addresses import http_url, parse_host, parse_url
from epd.config.admission import AdmissionConfig
from epd.config.failure import BreakerConfig, RetryConfig
from epd.config.routing import RoutingConfig
from epd.config.sglang import GPUGroup, SGLangTuning
from epd.types import Stage


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is no device: give cpu, cuda or cuda:N")
    return text


def _split_labels(value: Any) -> Any:
    """`["zone=a"]`, as on a command line, is `{"zone": "a"}`."""
    if not isinstance(value, list):
        return value
    pairs = [str(item).partition("=") for item in value]
    for name, mark, text in pairs:
        if not (name and mark and text):
            raise ValueError(f"{name + mark + text!r} is no label: give NAME=VALUE, as in zone=a")
    return {name: text for name, _, text in pairs}


Port = Annotated[int, Field(ge=1, le=65535)]
FreePort = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Engine = Literal["torch", "sglang", "sim"]
Device = Annotated[str, AfterValidator(_device)]
Host = Annotated[str, AfterValidator(parse_host)]
URL = Annotated[str, AfterValidator(parse_url)]
Labels = Annotated[dict[str, str], BeforeValidator(_split_labels)]
LogLevel = Literal["debug", "info", "warning", "error"]
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
ANY_HOSTS = frozenset({"0.0.0.0", "::"})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LeaseConfig(_Section):
    """How the coordinator knows that a worker lives."""

    heartbeat_s: Seconds = 1.0
    """A worker reports this often."""
    lease_s: Seconds = 5.0
    """A worker silent for longer is lost: it gets no work until it reports again."""

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> LeaseConfig:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError("lease_s must be at least twice heartbeat_s, or one lost packet kills")
        return self


class MediaConfig(_Section):
    """Limits on what a client may make the coordinator fetch and a worker decode."""

    max_bytes: int = Field(default=20 * 2**20, ge=1)
    """Largest image file."""
    max_pixels: int = Field(default=100_000_000, ge=1)
    """Width times height, read from the file's header before anything is decoded."""
    max_images_per_request: int = Field(default=64, ge=1)
    """Most images in all messages of one request."""
    timeout_s: Seconds = 10.0
    """How long fetching one image may take, redirects included."""
    max_redirects: int = Field(default=3, ge=0)
    """Redirects followed for one image; each target is checked like the first."""
    max_concurrent_fetches: int = Field(default=32, ge=1)
    """Images fetched at once, over all requests; further ones wait."""
    cache_bytes: int = Field(default=2**30, ge=1)
    """Image files kept in the coordinator's memory."""
    allow_private_addresses: bool = False
    """Fetch from private, loopback and link-local addresses too (see docs/security.md)."""
    allowed_domains: tuple[str, ...] = ()
    """If not empty, image URLs of these domains and their subdomains only."""

    @model_validator(mode="after")
    def _cache_holds_an_image(self) -> MediaConfig:
        if self.cache_bytes < self.max_bytes:
            raise ValueError(
                f"cache_bytes ({self.cache_bytes}) must hold at least one image of max_bytes "
                f"({self.max_bytes})"
            )
        return self


class RequestConfig(_Section):
    """Deadlines and limits of one request."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Largest request body; data URLs count."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Requests served at once; more are refused with 503."""
    max_in_flight_bytes: int = Field(default=512 * 2**20, ge=1024)
    """Request bodies held at once, until their images are cached; more are refused with 503."""
    first_token_s: Seconds = 60.0
    """No first token by then: the request ends with 504."""
    stall_s: Seconds = 30.0
    """No byte from the decode worker, or none read by the client, for so long: an error ends it."""
    total_s: Seconds = 600.0
    """A request that takes longer ends with an error."""

    @model_validator(mode="after")
    def _one_body_fits(self) -> RequestConfig:
        if self.max_in_flight_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_in_flight_bytes ({self.max_in_flight_bytes}) must hold at least one body of "
                f"max_body_bytes ({self.max_body_bytes})"
            )
        return self


class ExistingServer(_Section):
    """An SGLang server that somebody else starts and stops, put under this coordinator."""

    url: URL
    """Where it answers."""
    stage: Stage
    """encode, prefill or decode: how it was started."""
    model: str = Field(min_length=1)
    """Its checkpoint, of which the small files are read here to count image tokens."""
    served_model_name: str | None = None
    """The name clients use; the last part of `model` if not given."""
    bootstrap_port: Port = 8998
    """Its --disaggregation-bootstrap-port, if it is a prefill server."""
    encode_window: int = Field(default=8, ge=1)
    """Image parts it works on at once, if it is an encode server."""
    labels: Labels = {}
    """Where it runs: node, rack, zone."""
    stall_s: Seconds = 30.0
    """Work without movement for longer, and it gets no more until it moves again."""


class CoordinatorConfig(_Section):
    """The coordinator."""

    host: Host = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on."""
    advertise: URL | None = None
    """URL under which workers reach the coordinator, if not http://host:port."""
    token_file: Path | None = None
    """File of the cluster token; by default one in the user's state folder."""
    api_keys_file: Path | None = None
    """File of the API keys that clients may present, one a line (see docs/admission.md)."""
    allow_anonymous: bool = False
    """Serve clients without an API key on an address that other machines can reach."""
    encoder_slots: int = Field(default=8, ge=1, le=64)
    """Encoder URLs given to a prefill worker: so many images of a request are encoded at once."""
    fleet: tuple[ExistingServer, ...] = ()
    """SGLang servers that run already; they are checked and scheduled like workers of our own."""
    lease: LeaseConfig = LeaseConfig()
    media: MediaConfig = MediaConfig()
    requests: RequestConfig = RequestConfig()
    admission: AdmissionConfig = AdmissionConfig()
    routing: RoutingConfig = RoutingConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    log_level: LogLevel = "info"
    """Least severe log message that is written."""

    @model_validator(mode="after")
    def _is_safe_to_expose(self) -> CoordinatorConfig:
        exposed = self.host not in LOOPBACK_HOSTS
        if exposed and self.api_keys_file is None and not self.allow_anonymous:
            raise ValueError(
                f"host {self.host} can be reached by other machines: set api_keys_file, "
                "or allow_anonymous: true if the network itself is trusted"
            )
        if self.host in ANY_HOSTS and self.advertise is None:
            raise ValueError(f"host {self.host} needs advertise: the URL workers reach it by")
        return self

    @property
    def url(self) -> str:
        """Where workers and `epd` commands reach the coordinator."""
        return self.advertise or http_url(self.host, self.port)


class WorkerTuning(SGLangTuning):
    """What a pool may set for all of its workers; `epd launch` takes the same as options."""

    host: Host = "127.0.0.1"
    """Address to listen on."""
    advertise: Host | None = None
    """Host name or address under which other machines reach this worker, if not `host`."""
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    """How embeddings and KV travel between workers."""
    transfer_device: str = ""
    """RDMA devices, such as mlx5_0; empty lets Mooncake choose."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; one worker alone on a machine may leave it to torch."""
    context_tokens: int | None = Field(default=None, ge=16)
    """Longest prompt plus answer; the model's own limit if not given."""
    embedding_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Embedding arena of an encode or prefill worker."""
    kv_bytes: int = Field(default=512 * 2**20, ge=2**20)
    """KV arena of a prefill or decode worker."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests a worker runs at once."""
    chunk_tokens: int = Field(default=2048, ge=16)
    """Prompt tokens per prefill step."""
    profile: Path | None = None
    """sim: YAML file of the simulated worker's speed and sizes; see docs/sim.md."""
    request_timeout_s: Seconds = 60.0
    """How long one wait inside a worker (room, memory, hand-off) may last."""
    drain_s: Seconds = 60.0
    """How long a draining worker may take to finish what runs."""
    log_level: LogLevel = "info"
    """Least severe log message that is written."""

    @model_validator(mode="after")
    def _is_reachable(self) -> WorkerTuning:
        if self.host in ANY_HOSTS and self.advertise is None:
            raise ValueError(f"host {self.host} needs advertise: the address peers reach it by")
        return self

    @property
    def advertised_host(self) -> str:
        return self.advertise or self.host


class WorkerConfig(WorkerTuning):
    """One worker. `epd launch` has an option of the same name for each field."""

    stage: Stage
    """encode, prefill or decode."""
    model: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or the name of a bundled one."""
    coordinator: URL = "http://127.0.0.1:8000"
    """The coordinator's URL."""
    engine: Engine = "torch"
    """What computes the stage."""
    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    port: FreePort = 0
    """Port to listen on; 0 takes a free one."""
    worker_id: str | None = None
    """The worker's name in the registry; made up if not given."""
    label: Labels = Field(default={})
    """Where it runs: node, rack, zone (see docs/routing.md); others are only shown."""
    served_model_name: str | None = None
    """The name clients use; the last part of `model` if not given."""
    token_file: Path | None = None
    """File of the cluster token; by default one in the user's state folder."""


class PoolConfig(_Section):
    """One stage's pool under `epd up`."""

    replicas: int = Field(default=1, ge=0)
    """Workers of this stage."""
    engine: Engine = "torch"
    """What computes the stage."""
    devices: list[Device] = Field(default=["cpu"], min_length=1)
    """Replica i runs on devices[i % len(devices)]."""
    gpus: list[GPUGroup] = []
    """sglang: replica i uses the GPUs gpus[i], such as [[0, 1], [2, 3]] with `tp: 2`."""
    worker: WorkerTuning = WorkerTuning()

    @model_validator(mode="after")
    def _every_replica_has_gpus(self) -> PoolConfig:
        if self.gpus and len(self.gpus) < self.replicas:
            raise ValueError(f"gpus names {len(self.gpus)} groups for {self.replicas} replicas")
        if self.gpus and self.worker.gpus:
            raise ValueError("gpus and worker.gpus both name GPUs: give gpus only")
        num_gpus = self.worker.num_gpus
        for group in self.gpus:
            # Each replica's own configuration would refuse it too, but only once it is made.
            if len(group) != num_gpus or len(set(group)) != num_gpus:
                raise ValueError(
                    f"gpus gives a replica {list(group)}, but its parallelism needs {num_gpus} "
                    "different GPUs"
                )
        return self

    def gpus_of(self, replica: int) -> GPUGroup:
        """The GPUs that one replica has for itself, wherever they are named."""
        return self.gpus[replica] if self.gpus else self.worker.gpus

    def device_of(self, replica: int) -> Device:
        """Where one replica runs; several may share a device."""
        return self.devices[replica % len(self.devices)]


class PoolsConfig(_Section):
    """The three pools."""

    encode: PoolConfig = PoolConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    def items(self) -> list[tuple[Stage, PoolConfig]]:
        return [
            (Stage.ENCODE, self.encode),
            (Stage.PREFILL, self.prefill),
            (Stage.DECODE, self.decode),
        ]


class DeploymentConfig(_Section):
    """What runs on this machine: a coordinator, unless it is elsewhere, and pools for it."""

    model: str = Field(default="tiny-vl", min_length=1)
    """Folder of a Hugging Face checkpoint, or the name of a bundled one."""
    served_model_name: str | None = None
    """The name clients use; the last part of `model` if not given."""
    join: URL | None = None
    """A coordinator on another machine: run the pools for it, and none here."""
    node: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    """Begins the names of the workers, so that those of two machines differ."""
    labels: Labels = {}
    """Where this machine is, for all of its workers: rack, zone (see docs/routing.md)."""
    mooncake_master: Port | None = None
    """Run the master of a Mooncake Store here on this port, for what names it kv_tier_master."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    pools: PoolsConfig = PoolsConfig()

    @model_validator(mode="after")
    def _gpus_are_not_shared(self) -> DeploymentConfig:
        replicas = [
            (f"{stage}-{replica}", pool.gpus_of(replica), pool.device_of(replica))
            for stage, pool in self.pools.items()
            for replica in range(pool.replicas)
        ]
        owners: dict[int, str] = {}
        for name, gpus, _ in replicas:
            for gpu in gpus:
                if gpu in owners:
                    raise ValueError(f"{owners[gpu]} and {name} are both given GPU {gpu}")
                owners[gpu] = name
        for name, gpus, device in replicas:
            if device.startswith("cuda") and not gpus:
                gpu = int(device.partition(":")[2] or 0)
                if gpu in owners:
                    raise ValueError(f"{name} runs on {device}, but GPU {gpu} is {owners[gpu]}'s")
        return self

    @model_validator(mode="after")
    def _kv_can_be_handed_over(self) -> DeploymentConfig:
        prefill, decode = self.pools.prefill, self.pools.decode
        is_pair = prefill.replicas and decode.replicas and prefill.engine == decode.engine
        for name in ("tp", "pp", "kv_cache_dtype"):
            ours, theirs = getattr(prefill.worker, name), getattr(decode.worker, name)
            # Crashes and silently wrong answers were seen (sglang#15674, #9266, #8324).
            if is_pair and ours != theirs:
                raise ValueError(
                    f"{name} differs between prefill ({ours}) and decode ({theirs}): KV cannot be "
                    "handed over"
                )
        return self

    @model_validator(mode="after")
    def _has_one_coordinator(self) -> DeploymentConfig:
        if self.join is not None and not self.node:
            raise ValueError("join needs node: a name for this machine's workers")
        return self

    @property
    def url(self) -> str:
        """The coordinator's, here or elsewhere."""
        return self.join or self.coordinator.url

    def worker_id(self, stage: Stage, replica: int) -> str:
        """The name of one replica of a pool."""
        return f"{self.node}-{stage}-{replica}" if self.node else f"{stage}-{replica}"

    def worker(self, stage: Stage, replica: int) -> WorkerConfig:
        """The configuration of one replica of a pool."""
        pool = dict(self.pools.items())[stage]
        tuning = pool.worker.model_dump(exclude_unset=True)
        if gpus := pool.gpus_of(replica):
            tuning["gpus"] = gpus
        return WorkerConfig(
            stage=stage,
            model=self.model,
            served_model_name=self.served_model_name,
            worker_id=self.worker_id(stage, replica),
            coordinator=self.url,
            engine=pool.engine,
            device=pool.device_of(replica),
            token_file=self.coordinator.token_file,
            label=self.labels,
            **tuning,
        )
