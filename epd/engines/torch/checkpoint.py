"""A checkpoint folder: its configuration, and the weights of one stage read from its safetensors.

An encode worker loads only the vision tower, a prefill or decode worker only the language model;
other tensors are not read from disk. Models are built without memory and then given the tensors
that were read, so weights are never held twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from encoders import ImageBudget, ModelFamily, WeightPart, family_of
from epd.engines.torch.language_model import LanguageConfig, LanguageModel
from epd.errors import ConfigError

VISION_TOWERS: dict[str, tuple[type[PreTrainedModel], Callable[..., Any]]] = {
    "qwen2_vl": (Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig),
    "qwen2_5_vl": (Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig),
}
_FINGERPRINT_BYTES = 2**20


def default_dtype(device: torch.device | str) -> torch.dtype:
    """fp32 on CPU, where greedy output must equal transformers'; bf16 on a GPU."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


class Checkpoint:
    """The small files of a checkpoint folder, read when first asked for.

    Every property raises `ConfigError` if its file is missing or makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._json("config.json")

    @cached_property
    def preprocessor(self) -> dict[str, Any]:
        """The image processor's settings; transformers 5 may put them in processor_config.json."""
        if (self.path / "preprocessor_config.json").exists():
            return self._json("preprocessor_config.json")
        return self._json("processor_config.json").get("image_processor") or {}

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def family(self) -> ModelFamily:
        return family_of(self.model_type)

    @property
    def image_budget(self) -> ImageBudget:
        return self.family.image_budget(self.config, self.preprocessor)

    @property
    def language(self) -> LanguageConfig:
        return LanguageConfig.from_json(self.config)

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer."""
        return self.language.max_position_embeddings

    @property
    def image_token_id(self) -> int:
        token_id = self.config.get("image_token_id")
        if not isinstance(token_id, int):
            raise ConfigError(f"{self.path / 'config.json'} lacks image_token_id")
        return token_id

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: generation_config.json's, else config.json's."""
        found: Any = None
        if (self.path / "generation_config.json").exists():
            found = self._json("generation_config.json").get("eos_token_id")
        if found is None:
            text = self.config.get("text_config") or {}
            found = self.config.get("eos_token_id", text.get("eos_token_id"))
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])

    @cached_property
    def weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            names = set(self._json(index.name).get("weight_map", {}).values())
            return [self.path / name for name in sorted(names)]
        single = self.path / "model.safetensors"
        if not single.exists():
            raise ConfigError(f"{self.path} holds no model.safetensors (nor its index)")
        return [single]

    @cached_property
    def fingerprint(self) -> str:
        """Names these weights, so that two workers can tell whether they serve the same model.

        Reads the configuration and the ends of each weight file, not gigabytes.
        """
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for path in self.weight_files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_FINGERPRINT_BYTES))
                file.seek(max(0, size - _FINGERPRINT_BYTES))
                digest.update(file.read(_FINGERPRINT_BYTES))
        return digest.hexdigest()[:32]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: is this a model's folder?") from None
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return content


def load_vision(
    path: Path, device: torch.device | str, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The vision tower of the checkpoint at `path`, ready to run. Blocks while it reads.

    Raises:
        ConfigError: no such model, or its weights are not those that its config asks for.
    """
    checkpoint = Checkpoint(path)
    if checkpoint.model_type not in VISION_TOWERS:
        raise ConfigError(f"no vision tower for model_type {checkpoint.model_type!r}")
    tower_type, config_type = VISION_TOWERS[checkpoint.model_type]
    config = config_type(**checkpoint.config.get("vision_config", {}))
    with torch.device("meta"):
        tower: Any = tower_type._from_config(config)  # pyright: ignore[reportPrivateUsage]
    _load(tower, checkpoint, WeightPart.VISION, device, dtype or default_dtype(device))
    # Its frequencies are computed, not stored, so the checkpoint could not fill them.
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
    return tower


def load_language(
    path: Path, device: torch.device | str, dtype: torch.dtype | None = None
) -> LanguageModel:
    """The language model of the checkpoint at `path`, ready to run. Blocks while it reads.

    Raises:
        ConfigError: no such model, or its weights are not those that its config asks for.
    """
    checkpoint = Checkpoint(path)
    config = checkpoint.language
    with torch.device("meta"):
        model = LanguageModel(config)
    if config.has_tied_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    _load(model, checkpoint, WeightPart.LANGUAGE, device, dtype or default_dtype(device))
    return model


def _load(
    model: nn.Module,
    checkpoint: Checkpoint,
    part: WeightPart,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """Fill `model`, which is on the meta device, with the weights of its part."""
    tied = part is WeightPart.LANGUAGE and checkpoint.language.has_tied_embeddings
    weights = _read(checkpoint, part, device, dtype, skip="lm_head.weight" if tied else None)
    if tied and "embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    expected = set(model.state_dict())
    _refuse("lacks", expected - set(weights), checkpoint, part)
    _refuse("has unexpected", set(weights) - expected, checkpoint, part)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as exc:  # shapes that differ
        raise ConfigError(f"{checkpoint.path}: weights do not fit config.json: {exc}") from exc
    model.requires_grad_(False).eval()
    if tied:
        # Assigning made two parameters of one tensor: make them one again.
        assert isinstance(model, LanguageModel)
        model.lm_head.weight = model.embed_tokens.weight


def _read(
    checkpoint: Checkpoint,
    part: WeightPart,
    device: torch.device | str,
    dtype: torch.dtype,
    skip: str | None,
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in checkpoint.weight_files:
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for stored_name in file.keys():  # noqa: SIM118 (not a dict)
                    found_part, name = checkpoint.family.locate_weight(stored_name)
                    # Older checkpoints store rotary frequencies, which are computed here.
                    if found_part is part and name != skip and not name.endswith("inv_freq"):
                        weights[name] = file.get_tensor(stored_name).to(dtype)
        except (OSError, SafetensorError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
    return weights


def _refuse(problem: str, names: Iterable[str], checkpoint: Checkpoint, part: WeightPart) -> None:
    first = sorted(names)
    if first:
        shown = ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")
        raise ConfigError(f"{checkpoint.path} {problem} {part} weights: {shown}")


def num_parameters(model: nn.Module) -> int:
    """Numbers the model holds; tied weights, which share memory, count once."""
    return sum(parameter.numel() for parameter in model.parameters())
