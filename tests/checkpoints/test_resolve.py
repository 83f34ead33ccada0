"""From what a user calls a model to its folder."""

from pathlib import Path

import pytest

from epd.checkpoints import bundled_names, resolve
from epd.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return whole(tmp_path / "bundled" / "tiny").parent


def whole(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


def test_the_bundled_model_is_found_by_its_name() -> None:
    assert "tiny-vl" in bundled_names()
    assert (resolve("tiny-vl") / "config.json").is_file()


def test_a_name_or_a_path_gives_the_folder(root: Path, tmp_path: Path) -> None:
    assert resolve("tiny", root=root) == root / "tiny"
    mine = whole(tmp_path / "mine")
    assert resolve(str(mine), root=root) == mine
    assert resolve(f"{mine}/", root=root) == mine


def test_a_home_folder_may_be_abbreviated(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = whole(tmp_path / "mine")
    assert resolve("~/mine", root=root) == mine


def test_a_bundled_name_wins_unless_the_folder_is_meant(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = whole(tmp_path / "tiny")
    assert resolve("tiny", root=root) == root / "tiny"
    assert resolve("./tiny", root=root) == mine


def test_an_unknown_name_lists_those_that_are_bundled(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model 'tiney' is neither .* \(bundled: tiny\)$"):
        resolve("tiney", root=root)
    with pytest.raises(ConfigError, match="no checkpoint is bundled"):
        resolve("tiny", root=tmp_path / "nothing")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_whole_checkpoint_says_what_it_lacks(
    root: Path, tmp_path: Path, missing: str
) -> None:
    path = whole(tmp_path / "mine")
    (path / missing).unlink()
    with pytest.raises(ConfigError, match=missing.removeprefix("model")):
        resolve(str(path), root=root)


def test_a_file_is_no_checkpoint(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ConfigError, match="neither the folder of a checkpoint"):
        resolve(str(path), root=root)
