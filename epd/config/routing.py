"""How the coordinator chooses workers: a policy for each stage, and what they weigh."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Cost = Annotated[float, Field(ge=0)]


class LinkConfig(BaseModel):
    """What handing a token over costs, in tokens that prefill could compute in the same time.

    The defaults are those of Qwen2.5-VL-7B: 56 KiB of KV a token in bf16 (28 layers, keys and
    values, 4 heads of 128) against 35 µs of prefill (15 GFLOP at 0.43 PFLOP/s), over 400, 100 and
    25 Gb/s.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    same_node: Cost = 0.0
    """Cost per token between workers of one node: one `node` label, or one host in their URLs."""
    same_rack: Cost = 0.03
    """Cost per token between nodes of one `rack` label."""
    same_zone: Cost = 0.13
    """Cost per token between racks of one `zone` label."""
    elsewhere: Cost = 0.5
    """Cost per token between workers that have none of these in common."""

    @model_validator(mode="after")
    def _further_is_not_cheaper(self) -> LinkConfig:
        costs = [self.same_node, self.same_rack, self.same_zone, self.elsewhere]
        if costs != sorted(costs):
            raise ValueError("same_node, same_rack, same_zone and elsewhere must not decrease")
        return self


class RoutingConfig(BaseModel):
    """Which worker gets what; docs/routing.md has the formulas."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    encode: Literal["affinity", "least_loaded", "round_robin", "random"] = "affinity"
    """How an encode worker is chosen for an image (see docs/routing.md)."""
    prefill: Literal["prefix", "least_loaded", "round_robin", "random"] = "prefix"
    """How a prefill worker is chosen."""
    decode: Literal["kv_headroom", "least_loaded", "round_robin", "random"] = "kv_headroom"
    """How a decode worker is chosen."""
    seed: int | None = None
    """Of the random choices; they differ from run to run if not given."""
    max_encode_queue_ratio: float = Field(default=1.25, ge=1)
    """affinity: an encode worker's queue may be so many times the mean before images go on."""
    free_encode_queue_tokens: int = Field(default=1024, ge=0)
    """affinity: image tokens that may queue at an encode worker whatever the mean."""
    prefill_backlog_weight: float = Field(default=1.0, ge=0)
    """prefix: tokens of known prefix that one token of backlog outweighs."""
    max_prefix_blocks: int = Field(default=16_384, ge=1)
    """prefix: blocks (64 tokens of text, or an image) remembered of each prefill worker."""
    decode_reserved_tokens: int = Field(default=512, ge=0)
    """KV tokens reserved for an answer, or its `max_tokens` if that is less."""
    decode_request_tokens: int = Field(default=256, ge=0)
    """kv_headroom: KV tokens that slow a decode step down as much as one request more."""
    link: LinkConfig = LinkConfig()
