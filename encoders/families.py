"""Which family serves which `model_type`."""

from __future__ import annotations

from encoders.base import ModelFamily
from encoders.qwen2_vl import Qwen2VLFamily
from epd.errors import ConfigError

FAMILIES: tuple[ModelFamily, ...] = (Qwen2VLFamily(),)


def family_of(model_type: str) -> ModelFamily:
    """The family of a config.json's `model_type`.

    Raises:
        ConfigError: no family serves it; the message lists those that exist.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ConfigError(f"model_type {model_type!r} is not supported; supported are: {known}")
