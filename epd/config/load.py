"""Reading configuration: YAML into the schema, with errors that name the key and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd.config.schema import CoordinatorConfig, DeploymentConfig
from epd.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

OPTIONS = "options"
"""The `source` of values that came from the command line: keys are then written as options."""


def load_deployment(path: Path, **overrides: object) -> DeploymentConfig:
    """Read a deployment file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a key is unknown or wrong.
    """
    return build(DeploymentConfig, {**read_yaml(path), **_given(overrides)}, source=str(path))


def load_coordinator(path: Path | None, **overrides: object) -> CoordinatorConfig:
    """Read the `coordinator` section of a deployment file; options override the file.

    Raises:
        ConfigError: as `load_deployment`.
    """
    options = _given(overrides)
    if path is None:
        return build(CoordinatorConfig, options, source=OPTIONS)
    document = read_yaml(path)
    section = document.get("coordinator") or {}
    # Checked whole, so that a typo elsewhere in the file does not pass unseen; options are merged
    # first, since they may mend what the file lacks.
    if isinstance(section, dict):
        document["coordinator"] = {**section, **options}
    source = f"{path} and options" if options else str(path)
    return build(DeploymentConfig, document, source=source).coordinator


def build(kind: type[ConfigT], values: Mapping[str, Any], *, source: str) -> ConfigT:
    """Validate `values` as a `kind`.

    Raises:
        ConfigError: one line: the source, the key and what to do.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        if source == OPTIONS:
            raise ConfigError("; ".join(_explain_option(error) for error in errors)) from None
        lines = [_explain(kind, error) for error in errors]
        raise ConfigError(f"{source}: {'; '.join(lines)}") from None


def _given(overrides: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in overrides.items() if value is not None}


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file; none if it is empty.

    Raises:
        ConfigError: it cannot be read, is not YAML, or holds something else.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror})") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        reason = " ".join(str(exc).split())
        raise ConfigError(f"{path}: not valid YAML: {reason}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected keys and values, found a {type(document).__name__}")
    return {str(key): value for key, value in document.items()}


def _explain(kind: type[BaseModel], error: ErrorDetails) -> str:
    path = ".".join(str(step) for step in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _keys_at(kind, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {path}; {hint}"
    return f"{path}: {_message(error)}" if path else _message(error)


def _explain_option(error: ErrorDetails) -> str:
    name = "-".join(str(step) for step in error["loc"][:1]).replace("_", "-")
    if error["type"] == "missing":
        return f"--{name} is missing"
    return f"--{name}: {_message(error)}" if name else _message(error)


def _message(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _keys_at(kind: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    for step in location:
        field = kind.model_fields.get(str(step))
        if field is None:
            break
        options = [field.annotation, *get_args(field.annotation)]
        models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not models:
            break
        kind = models[0]
    return sorted(kind.model_fields)
