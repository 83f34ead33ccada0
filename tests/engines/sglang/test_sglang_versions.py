from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.engines.sglang.checkpoint import locate, model_card, read_config
from epd.engines.sglang.versions import SUPPORTED, check_model, check_version
from epd.errors import ConfigError

VERSION = SUPPORTED["0.5.23"]


def test_an_untested_version_is_refused_unless_asked_for() -> None:
    assert check_version("0.5.23").number == "0.5.23"
    with pytest.raises(ConfigError, match=r"SGLang 0\.6\.0 .* tested with 0\.5\.23"):
        check_version("0.6.0")
    assert check_version("0.6.0", allow_untested=True).number == "0.5.23"


def test_a_model_whose_encoder_cannot_be_split_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="cannot run the encoder of LlavaForConditionalGeneration"
    ):
        check_model({"architectures": ["LlavaForConditionalGeneration"]}, VERSION)
    with pytest.raises(ConfigError, match="none"):
        check_model({}, VERSION)


@pytest.mark.parametrize(("patch", "is_served"), [(14, True), (4, False)])
def test_qwen2_5_vl_with_other_patches_is_refused(patch: int, is_served: bool) -> None:
    """SGLang 0.5.23 would take its pixels for finished embeddings."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {"patch_size": patch, "temporal_patch_size": 2, "in_channels": 3},
    }
    if is_served:
        check_model(config, VERSION)
    else:
        with pytest.raises(ConfigError, match="14 x 14"):
            check_model(config, VERSION)


def write(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_model_of_an_unknown_family_is_served_without_a_token_count(tmp_path: Path) -> None:
    write(tmp_path, model_type="kimi_vl", text_config={"max_position_embeddings": 4096})
    card = model_card(tmp_path, model_id="vl")
    assert (card.model_type, card.context_tokens, card.image_budget) == ("kimi_vl", 4096, None)
    assert card.model_id == "vl"


def test_a_known_family_counts_tokens(tmp_path: Path) -> None:
    write(tmp_path, model_type="qwen2_vl", max_position_embeddings=512, vision_config={})
    card = model_card(tmp_path, model_id="vl")
    assert card.image_budget is not None
    assert card.model_id == "vl"


def test_files_that_make_no_sense_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)
    write(tmp_path, model_type="qwen2_vl")
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        model_card(tmp_path, model_id="vl")


def test_a_folder_is_found_and_a_wrong_path_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path, model_type="qwen2_vl")
    assert locate(str(tmp_path)) == (str(tmp_path), tmp_path)
    for wrong in (str(tmp_path / "none"), "./a/b", "plain"):
        with pytest.raises(ConfigError, match="neither the folder"):
            locate(wrong)
