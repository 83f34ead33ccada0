"""What EPD must know of a model before SGLang has loaded it, from its small files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from encoders import ImageBudget, family_of
from encoders.families import FAMILIES
from epd.checkpoints import resolve
from epd.errors import ConfigError, EPDError
from epd.wire import ModelCard

_SMALL_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def locate(model: str) -> tuple[str, Path]:
    """What SGLang is told to load, and the folder of the model's small files.

    Args:
        model: a folder, the name of a bundled checkpoint, or a name on the Hugging Face hub.

    Raises:
        ConfigError: it is none of them.
    """
    try:
        folder = resolve(model)
    except ConfigError:
        if model.count("/") != 1 or model.startswith((".", "/", "~")):
            raise
        return model, _from_hub(model)
    return str(folder), folder


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises ConfigError if it cannot be read."""
    config = _read(folder / "config.json")
    if config is None:
        raise ConfigError(f"{folder} has no config.json: is this a model's folder?")
    return config


def model_card(folder: Path, *, model_id: str, context_tokens: int | None = None) -> ModelCard:
    """How a worker presents its model to the coordinator.

    Args:
        folder: the model's small files.
        model_id: the name clients use.
        context_tokens: the operator's limit; the model's own if None.

    Raises:
        ConfigError: a file of the model cannot be read.
    """
    settings = read_config(folder)
    text = settings.get("text_config") or settings.get("thinker_config") or settings
    limit = text.get("max_position_embeddings") or settings.get("max_position_embeddings")
    context_tokens = context_tokens or limit
    if not isinstance(context_tokens, int):
        raise ConfigError(f"{folder / 'config.json'} does not say max_position_embeddings")
    return ModelCard(
        model_id=model_id,
        model_type=str(settings.get("model_type")),
        context_tokens=context_tokens,
        image_budget=_image_budget(folder, settings),
    )


def _image_budget(folder: Path, settings: dict[str, Any]) -> ImageBudget | None:
    """None for a family whose arithmetic EPD does not know: its images count as no tokens."""
    model_type = str(settings.get("model_type"))
    if not any(model_type in family.model_types for family in FAMILIES):
        return None
    preprocessor = _read(folder / "preprocessor_config.json")
    if preprocessor is None:
        preprocessor = (_read(folder / "processor_config.json") or {}).get("image_processor") or {}
    return family_of(model_type).image_budget(settings, preprocessor)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(_SMALL_FILES)))
    except EPDError:
        raise
    except Exception as exc:  # The hub's client raises errors of several libraries.
        raise ConfigError(
            f"model {name!r} is no folder, and its config.json cannot be had from the Hugging "
            f"Face hub: {exc}"
        ) from exc


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
