import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.engines.torch.checkpoint import Checkpoint, load_language, load_vision
from epd.engines.torch.language_model import LanguageConfig
from epd.errors import ConfigError


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_each_loader_holds_its_part_and_nothing_else(checkpoint_path: Path, reference: Any):
    whole = reference.model
    vision, language = load_vision(checkpoint_path, "cpu"), load_language(checkpoint_path, "cpu")
    assert num_parameters(vision) == num_parameters(whole.model.visual)
    assert num_parameters(vision) + num_parameters(language) == num_parameters(whole)
    expected = whole.model.visual.state_dict()
    assert vision.state_dict().keys() == expected.keys()
    for name, value in vision.state_dict().items():
        assert torch.equal(value, expected[name])


def test_loaded_parameters_are_frozen_and_have_memory(checkpoint_path: Path):
    for model in (load_vision(checkpoint_path, "cpu"), load_language(checkpoint_path, "cpu")):
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.device.type == "cpu" and not tensor.requires_grad
        assert not model.training


def test_weights_are_read_in_the_dtype_asked_for(checkpoint_path: Path):
    for load in (load_vision, load_language):
        model = load(checkpoint_path, "cpu", torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_embeddings_are_held_once(checkpoint_path: Path):
    model = load_language(checkpoint_path, "cpu")
    is_tied = Checkpoint(checkpoint_path).config["tie_word_embeddings"]
    assert (model.lm_head.weight is model.embed_tokens.weight) is is_tied


@pytest.fixture
def copy(checkpoint_path: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint_path, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite_weights(
    path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    weights = load_file(path / "model.safetensors")
    save_file(change(weights), path / "model.safetensors", {"format": "pt"})


def rewrite_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def assert_same_models(left: Path, right: Path) -> None:
    for load in (load_vision, load_language):
        expected, actual = load(left, "cpu").state_dict(), load(right, "cpu").state_dict()
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


def new_name(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1)


def test_names_of_transformers_5_are_read(checkpoint_path: Path, copy: Path):
    rewrite_weights(copy, lambda weights: {new_name(name): w for name, w in weights.items()})
    assert_same_models(checkpoint_path, copy)


def test_sharded_weights_are_read(checkpoint_path: Path, copy: Path):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    index: dict[str, str] = {}
    for shard in range(3):
        file_name = f"model-{shard}.safetensors"
        part = {name: weights[name] for name in names[shard::3]}
        save_file(part, copy / file_name, {"format": "pt"})
        index |= dict.fromkeys(part, file_name)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same_models(checkpoint_path, copy)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config in the shape of the hub's first Qwen2-VL checkpoints."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text.pop("model_type")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def test_the_older_flat_config_means_the_same(checkpoint_path: Path, copy: Path):
    rewrite_json(copy / "config.json", flat)
    assert Checkpoint(copy).language == Checkpoint(checkpoint_path).language
    assert Checkpoint(copy).language.rope_theta == 10_000.0
    assert_same_models(checkpoint_path, copy)


def test_a_stored_head_beside_tied_embeddings_is_not_used(copy: Path):
    rewrite_json(copy / "config.json", lambda config: config | {"tie_word_embeddings": True})
    rewrite_weights(
        copy, lambda weights: weights | {"lm_head.weight": weights["model.norm.weight"].clone()}
    )
    model = load_language(copy, "cpu")
    assert model.lm_head.weight is model.embed_tokens.weight


def test_missing_weights_are_named(copy: Path):
    rewrite_weights(copy, lambda weights: {n: w for n, w in weights.items() if "layers.1" not in n})
    with pytest.raises(ConfigError, match=r"lacks language weights: layers\.1\..* and 9 more"):
        load_language(copy, "cpu")
    load_vision(copy, "cpu")


def test_unexpected_weights_are_named(copy: Path):
    extra = {"visual.extra.weight": torch.zeros(1)}
    rewrite_weights(copy, lambda weights: weights | extra)
    with pytest.raises(ConfigError, match=r"unexpected vision weights: extra\.weight"):
        load_vision(copy, "cpu")
    load_language(copy, "cpu")


def test_weights_of_another_shape_are_named(copy: Path):
    narrow = {"model.norm.weight": torch.zeros(3)}
    rewrite_weights(copy, lambda weights: weights | narrow)
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        load_language(copy, "cpu")


def test_broken_checkpoints_give_a_config_error(copy: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_language(tmp_path, "cpu")
    (copy / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_vision(copy, "cpu")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        load_vision(copy, "cpu")
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_language(copy, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_the_model_cannot_do_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        LanguageConfig.from_json({"text_config": change})


def test_a_config_without_a_size_names_it():
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        LanguageConfig.from_json({})


def test_end_tokens_come_from_the_generation_config_first(copy: Path):
    checkpoint = Checkpoint(copy)
    assert len(checkpoint.eos_token_ids) == 2
    (copy / "generation_config.json").unlink()
    only = checkpoint.config["text_config"]["eos_token_id"]
    assert Checkpoint(copy).eos_token_ids == {only}


def test_fingerprints_tell_checkpoints_apart(checkpoint_path: Path, copy: Path):
    assert Checkpoint(copy).fingerprint == Checkpoint(checkpoint_path).fingerprint
    rewrite_weights(copy, lambda weights: {name: w + 1 for name, w in weights.items()})
    assert Checkpoint(copy).fingerprint != Checkpoint(checkpoint_path).fingerprint
