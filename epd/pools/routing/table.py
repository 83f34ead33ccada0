"""The policies by stage and name, as the configuration calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from epd.config import RoutingConfig
from epd.pools.routing.affinity import affinity
from epd.pools.routing.baselines import least_loaded, random, round_robin
from epd.pools.routing.kv_headroom import kv_headroom
from epd.pools.routing.prefix import prefix
from epd.pools.routing.snapshot import Policy
from epd.types import Stage

_BASELINES: dict[str, Callable[[RoutingConfig], Policy]] = {
    "least_loaded": lambda _: least_loaded,
    "round_robin": lambda _: round_robin,
    "random": lambda _: random,
}

POLICIES: Mapping[Stage, Mapping[str, Callable[[RoutingConfig], Policy]]] = {
    Stage.ENCODE: {
        "affinity": lambda config: partial(
            affinity,
            max_queue_ratio=config.max_encode_queue_ratio,
            free_queue_tokens=config.free_encode_queue_tokens,
        ),
        **_BASELINES,
    },
    Stage.PREFILL: {
        "prefix": lambda config: partial(prefix, backlog_weight=config.prefill_backlog_weight),
        **_BASELINES,
    },
    Stage.DECODE: {
        "kv_headroom": lambda config: partial(
            kv_headroom, request_tokens=config.decode_request_tokens
        ),
        **_BASELINES,
    },
}
"""How to make each policy from the configuration."""


def policy_of(stage: Stage, config: RoutingConfig) -> Policy:
    """The policy that the configuration names for a stage."""
    names = {
        Stage.ENCODE: config.encode,
        Stage.PREFILL: config.prefill,
        Stage.DECODE: config.decode,
    }
    return POLICIES[stage][names[stage]](config)
