"""The configuration file, field by field. Unknown keys are errors; defaults are stated here once.

Durations are seconds, sizes bytes. `epd up` reads all of it; `epd coordinator --config` reads the
`coordinator` section of the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.types import Stage

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
ANY_HOSTS = frozenset({"0.0.0.0", "::"})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LeaseConfig(_Section):
    heartbeat_s: Seconds = 1.0
    lease_s: Seconds = 5.0

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> LeaseConfig:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError("lease_s must be at least twice heartbeat_s, or one lost packet kills")
        return self


class MediaConfig(_Section):
    """Limits on what a client may make the coordinator fetch and a worker decode."""

    max_bytes: int = Field(default=20 * 2**20, ge=1)
    max_pixels: int = Field(default=100_000_000, ge=1)
    max_images_per_request: int = Field(default=64, ge=1)
    timeout_s: Seconds = 10.0
    max_redirects: int = Field(default=3, ge=0)
    cache_bytes: int = Field(default=2**30, ge=1)
    allow_private_addresses: bool = False
    allowed_domains: list[str] = []


class RequestConfig(_Section):
    """Deadlines and limits of one request."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    max_in_flight: int = Field(default=1024, ge=1)
    first_token_s: Seconds = 60.0
    """No first token by then: the request ends with 504."""
    stall_s: Seconds = 30.0
    """No byte from the decode worker for so long: the request ends with an error."""
    total_s: Seconds = 600.0


class CoordinatorConfig(_Section):
    host: str = "127.0.0.1"
    port: Port = 8000
    advertise: str | None = None
    """URL under which workers reach the coordinator, if not http://host:port."""
    token_file: Path | None = None
    api_keys_file: Path | None = None
    allow_anonymous: bool = False
    """Serve clients without an API key on an address that other machines can reach."""
    encoder_slots: int = Field(default=8, ge=1, le=64)
    lease: LeaseConfig = LeaseConfig()
    media: MediaConfig = MediaConfig()
    requests: RequestConfig = RequestConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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


class WorkerConfig(_Section):
    """One worker. `epd launch` has an option of the same name for each field."""

    stage: Stage
    model: str = Field(min_length=1)
    coordinator: str = "http://127.0.0.1:8000"
    engine: Literal["torch"] = "torch"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    host: str = "127.0.0.1"
    port: Port = 0
    """0: a free port."""
    advertise: str | None = None
    """Host name or address under which other machines reach this worker, if not `host`."""
    worker_id: str | None = None
    served_model_name: str | None = None
    """The name clients use; the last part of `model` if not given."""
    token_file: Path | None = None
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
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
    chunk_tokens: int = Field(default=2048, ge=16)
    """Prompt tokens per prefill step."""
    request_timeout_s: Seconds = 60.0
    """How long one wait inside a worker (room, memory, hand-off) may last."""
    drain_s: Seconds = 60.0
    """How long a draining worker may take to finish what runs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _is_reachable(self) -> WorkerConfig:
        if self.host in ANY_HOSTS and self.advertise is None:
            raise ValueError(f"host {self.host} needs advertise: the address peers reach it by")
        return self

    @property
    def advertised_host(self) -> str:
        return self.advertise or self.host


class PoolConfig(_Section):
    """One stage's pool under `epd up`. Other worker fields go in `worker`."""

    replicas: int = Field(default=1, ge=0)
    engine: Literal["torch"] = "torch"
    devices: list[str] = ["cpu"]
    """Replica i runs on devices[i % len(devices)]."""
    worker: dict[str, str | int | float | None] = {}
    """Further fields of WorkerConfig, such as kv_bytes."""


class PoolsConfig(_Section):
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
    """A whole deployment on this machine: one coordinator and the pools it schedules."""

    model: str = Field(default="tiny-vl", min_length=1)
    coordinator: CoordinatorConfig = CoordinatorConfig()
    pools: PoolsConfig = PoolsConfig()

    @model_validator(mode="after")
    def _pools_are_valid(self) -> DeploymentConfig:
        for stage, pool in self.pools.items():
            for replica in range(max(1, pool.replicas)):
                self.worker(stage, replica)
        return self

    def worker(self, stage: Stage, replica: int) -> WorkerConfig:
        """The configuration of one replica of a pool."""
        pool = dict(self.pools.items())[stage]
        fields = {
            "stage": stage,
            "model": self.model,
            "engine": pool.engine,
            "device": pool.devices[replica % len(pool.devices)],
            "token_file": self.coordinator.token_file,
            **pool.worker,
        }
        return WorkerConfig.model_validate(fields)
