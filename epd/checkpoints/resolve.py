"""From what a user calls a model to the folder of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from epd.errors import ConfigError

_BUNDLED = Path(__file__).parent


def bundled_names(root: Path = _BUNDLED) -> list[str]:
    """Names of the checkpoints that ship with EPD."""
    return sorted(path.parent.name for path in root.glob("*/config.json"))


def resolve(name_or_path: str, *, root: Path = _BUNDLED) -> Path:
    """The folder of a checkpoint: a bundled name, or a path to a Hugging Face checkpoint.

    A bundled name wins over a folder of that name in the working directory; write `./name` for
    the folder.

    Args:
        name_or_path: what the user gave as the model.
        root: where the bundled checkpoints are.

    Raises:
        ConfigError: there is no such checkpoint, or the folder is not a whole one.
    """
    names = bundled_names(root)
    path = root / name_or_path if name_or_path in names else Path(name_or_path).expanduser()
    if not path.is_dir():
        known = f"bundled: {', '.join(names)}" if names else "no checkpoint is bundled"
        raise ConfigError(
            f"model {name_or_path!r} is neither the folder of a checkpoint nor a bundled name "
            f"({known})"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {name_or_path!r}: {path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model {name_or_path!r}: {path} has no *.safetensors file")
    return path.resolve()
