"""Ports of an SGLang server: the configured ones, or free ones where they are 0."""

from __future__ import annotations

import random

from epd.config import WorkerConfig
from epd.engines.sglang.flags import Ports
from epd.engines.shell import bind
from epd.errors import ConfigError
from epd.types import Stage

# Below the range from which the kernel takes ports for outgoing connections: SGLang binds its port
# only when the model is loaded, and until then nobody holds it.
_FREE_PORTS = range(20_000, 32_000)
_MAX_TRIES = 100


def choose_ports(config: WorkerConfig) -> Ports:
    """The configured ports, or free ones where they are 0.

    Raises:
        ConfigError: a configured port is in use, or none was found.
    """
    http = _choose(config.host, config.port, taken=())
    if config.stage is not Stage.PREFILL:
        return Ports(http=http)
    bootstrap = _choose(config.host, config.bootstrap_port, taken=(http,))
    encoders = _choose(config.host, 0, taken=(http, bootstrap))
    return Ports(http=http, bootstrap=bootstrap, encoders=encoders)


def _choose(host: str, port: int, *, taken: tuple[int, ...]) -> int:
    if port:
        bind(host, port).close()
        return port
    for candidate in random.sample(_FREE_PORTS, _MAX_TRIES):
        try:
            bind(host, candidate).close()
        except ConfigError:
            continue
        if candidate not in taken:
            return candidate
    raise ConfigError(f"no free port of {host} was found: name one with --port")
