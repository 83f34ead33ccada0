"""The settings of the sglang engine: what a pool or `epd launch` may say of an SGLang server.

What is not here is said in SGLang's own flags: `sglang_flags`, or after `--` of `epd launch`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from epd.addresses import parse_host_port

DP_ATTENTION = "--enable-dp-attention"


def _split_numbers(value: Any) -> Any:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _split_flags(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _join_numbers(value: tuple[int, ...]) -> str:
    return ",".join(map(str, value))


# In JSON they are one text, as on a command line: that is how `epd up` hands them to `epd launch`.
GPUGroup = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_split_numbers),
    PlainSerializer(_join_numbers, when_used="json"),
]
HostPort = Annotated[str, AfterValidator(parse_host_port)]
Flags = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_flags),
    PlainSerializer(shlex.join, when_used="json"),
]


class SGLangTuning(BaseModel):
    """Fields that only `engine: sglang` reads."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gpus: GPUGroup = ()
    """sglang: GPUs of this machine that the server uses, such as 0,1; no other worker may."""
    tp: int = Field(default=1, ge=1)
    """sglang: GPUs that share each layer (tensor parallelism)."""
    dp: int = Field(default=1, ge=1)
    """sglang: replicas inside one server (data parallelism)."""
    pp: int = Field(default=1, ge=1)
    """sglang: groups of layers on GPUs of their own (pipeline parallelism)."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """sglang: share of GPU memory for weights and KV; SGLang's own choice if not given."""
    embedding_transport: Literal["zmq", "mooncake"] = "zmq"
    """sglang: how embeddings reach prefill; mooncake writes GPU to GPU where there is RDMA."""
    embedding_cache: Literal["off", "prefix", "global"] = "prefix"
    """sglang: encoded images kept by each encode worker, or for all in Mooncake Store (global)."""
    kv_cache_dtype: str | None = None
    """sglang: number format of the KV cache, such as fp8_e4m3, which halves what is transferred."""
    bootstrap_port: int = Field(default=0, ge=0, le=65535)
    """sglang: port where decode asks a prefill worker for rooms; 0 takes a free one."""
    kv_tier: Literal["off", "host", "file", "mooncake", "hf3fs"] = "off"
    """sglang: where KV goes that leaves GPU memory: host memory, and behind it a shared store."""
    kv_tier_gb: int | None = Field(default=None, ge=1)
    """sglang: host memory of the tier in GB per GPU; twice the GPU's KV cache if not given."""
    kv_tier_path: Path | None = None
    """sglang: folder of `kv_tier: file`, or configuration file of hf3fs."""
    kv_tier_master: HostPort | None = None
    """sglang: host:port of the `mooncake_master` of `kv_tier: mooncake` and of a global cache."""
    start_s: float = Field(default=900.0, gt=0)
    """sglang: how long a server may take to load the model and be ready."""
    server_log: Path | None = None
    """sglang: file of the server's output; by default one per worker in the user's state folder."""
    allow_untested_sglang: bool = False
    """sglang: run with a version of SGLang that EPD was not tested with."""
    sglang_flags: Flags = ()
    """sglang: any flags of SGLang's server; those that the other settings make are refused."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the parallelism asks for; attention replicas share the tensor group's."""
        replicas = 1 if DP_ATTENTION in self.sglang_flags else self.dp
        return self.tp * self.pp * replicas

    @field_validator("embedding_cache", "kv_tier", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads `off` without quotes as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _gpus_fit(self) -> SGLangTuning:
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError(f"gpus {_join_numbers(self.gpus)} names one GPU twice")
        if self.gpus and len(self.gpus) != self.num_gpus:
            raise ValueError(
                f"gpus names {len(self.gpus)} GPUs, but tp {self.tp}, dp {self.dp}, pp {self.pp} "
                f"need {self.num_gpus}"
            )
        return self

    @model_validator(mode="after")
    def _tier_is_whole(self) -> SGLangTuning:
        if self.kv_tier in ("file", "hf3fs") and self.kv_tier_path is None:
            raise ValueError(f"kv_tier {self.kv_tier} needs kv_tier_path")
        needs_master = self.kv_tier == "mooncake" or self.embedding_cache == "global"
        if needs_master and self.kv_tier_master is None:
            what = "kv_tier mooncake" if self.kv_tier == "mooncake" else "embedding_cache global"
            raise ValueError(f"{what} needs kv_tier_master, such as 10.0.0.1:50051")
        if self.kv_tier == "off" and (self.kv_tier_gb or self.kv_tier_path):
            raise ValueError("kv_tier_gb and kv_tier_path need a kv_tier that is not off")
        return self
