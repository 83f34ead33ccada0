"""The versions of SGLang that EPD was tested with, and what it relies on in each.

Read from SGLang's wheel of that version; paths are under sglang/srt. To add a version: run
`make test-sglang` with it, compare these facts with its source, and add a line to the table.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd.errors import ConfigError, DependencyError


@dataclass(frozen=True, slots=True)
class Version:
    """What is true of one version of SGLang."""

    number: str
    split_encoder_architectures: frozenset[str]
    """`architectures[0]` of models whose encoder can be a server of its own."""
    qwen2_5_vl_patch_values: int
    """Length of a patch that Qwen2.5-VL takes for pixels: other lengths pass as embeddings."""


_0_5_23 = Version(
    number="0.5.23",
    # arg_groups/pd_disaggregation_hook.py:352
    split_encoder_architectures=frozenset(
        {
            "Dots3NoteForCausalLM",
            "Glm5NextForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "KimiK25ForConditionalGeneration",
            "KimiK3ForConditionalGeneration",
            "KimiVLForConditionalGeneration",
            "MiMoV2ForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
            "MuseSparkForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        }
    ),
    # models/qwen2_5_vl.py:780
    qwen2_5_vl_patch_values=3 * 2 * 14 * 14,
)
SUPPORTED: Mapping[str, Version] = {version.number: version for version in (_0_5_23,)}


def installed_version() -> str:
    """The version of the installed SGLang, without importing it.

    Raises:
        DependencyError: there is none.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise DependencyError(
            "the sglang engine needs SGLang in this environment: pip install '.[sglang]' in a "
            "clone of EPD (for a CPU: scripts/setup-sglang.sh; see docs/gpu.md)"
        ) from None


def check_version(number: str, *, allow_untested: bool = False) -> Version:
    """The facts of version `number`.

    Args:
        number: as its package says.
        allow_untested: take the newest known facts for a version that is not in the table.

    Raises:
        ConfigError: the version is not in the table.
    """
    known = SUPPORTED.get(number)
    if known is not None:
        return known
    newest = list(SUPPORTED.values())[-1]
    if allow_untested:
        return newest
    raise ConfigError(
        f"SGLang {number} is installed, but EPD was tested with {', '.join(SUPPORTED)}: run "
        f"pip install sglang=={newest.number}, or give --allow-untested-sglang"
    )


def check_model(config: Mapping[str, Any], version: Version) -> None:
    """Refuse a model that this SGLang cannot serve in three stages.

    Args:
        config: the checkpoint's config.json.
        version: the installed SGLang.

    Raises:
        ConfigError: the model is not one of them; the message says so and what would work.
    """
    architectures = config.get("architectures") or ["(none)"]
    if architectures[0] not in version.split_encoder_architectures:
        known = ", ".join(sorted(version.split_encoder_architectures))
        raise ConfigError(
            f"SGLang {version.number} cannot run the encoder of {architectures[0]} as a server of "
            f"its own; it can for {known}"
        )
    if config.get("model_type") == "qwen2_5_vl":
        _check_patch(config.get("vision_config") or {}, version)


def _check_patch(vision: Mapping[str, Any], version: Version) -> None:
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    patch = vision.get("patch_size", 14)
    values = channels * vision.get("temporal_patch_size", 2) * patch * patch
    if values != version.qwen2_5_vl_patch_values:
        raise ConfigError(
            f"SGLang {version.number} takes Qwen2.5-VL's patches of 14 x 14 pixels only; this "
            f"checkpoint has patches of {patch} x {patch}"
        )
