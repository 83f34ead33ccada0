"""Writes docs/configuration.md from the schema: `python -m epd.config.reference > FILE`."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from epd.config.schema import DeploymentConfig, WorkerConfig
from epd.types import Stage

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m epd.config.reference`; a test compares it with the schema. -->

`epd up FILE` reads a whole deployment; `epd coordinator --config FILE` reads the `coordinator`
section of the same file, and has an option for each of its keys that is no section. Options win
over the file, and the file over the defaults below. An unknown key is an error that names the key
and the nearest valid one. Durations are seconds (`_s`), sizes bytes (`_bytes`). An IPv6 address is
bare where it stands alone (`fd00::1`) and in brackets where a port may follow (`http://[fd00::1]`).
[configs/local-cpu.yaml](../configs/local-cpu.yaml) is a file to start from.

Environment: `EPD_CLUSTER_TOKEN` holds the cluster token, if no `token_file` is given;
`XDG_STATE_HOME` moves the folder of the default token file (see [security](security.md)).
"""


def render() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION, "## Deployment file\n", _table(_rows(DeploymentConfig))]
    parts += [
        "\n## Worker options\n",
        "Each is also an option of `epd launch`, with `-` for `_` (`--kv-bytes`). Under `epd up`, "
        "those listed above go in a pool's `worker` section and the rest follow from the file.\n",
        _table(_rows(WorkerConfig)),
    ]
    return "\n".join(parts) + "\n"


def listed_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is a list of; None if it is no such list."""
    if get_origin(annotation) in (list, tuple):
        item = get_args(annotation)[0]
        if isinstance(item, type) and issubclass(item, BaseModel):
            return item
    return None


def type_name(annotation: Any) -> str:
    """A field's type as a reader of the file writes it: `integer`, as in `list of text`."""
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in get_args(annotation) if a is not type(None))
    if origin is dict:
        return "texts by name"
    if origin in (list, tuple):
        return f"list of {type_name(get_args(annotation)[0])}"
    if origin is not None:
        return type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections"
    if annotation is Stage:
        return " | ".join(Stage)
    names = {str: "text", int: "integer", float: "number", bool: "true | false", Path: "path"}
    return names[annotation]


def _rows(kind: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    rows: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            rows += _rows(section, f"{prefix}{name}.")
        elif (item := listed_section(section)) is not None:
            rows.append((f"{prefix}{name}", field))
            rows += _rows(item, f"{prefix}{name}[].")
        else:
            rows.append((f"{prefix}{name}", field))
    return rows


def _table(rows: list[tuple[str, FieldInfo]]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    merged = dict(rows)
    for name, field in merged.items():
        # The three pools have the same keys: one row stands for all of them.
        if name.startswith(("pools.prefill.", "pools.decode.")):
            continue
        shown = name.replace("pools.encode.", "pools.STAGE.")
        kind = type_name(field.annotation).replace("|", "\\|")
        lines.append(f"| `{shown}` | {kind} | {_default(field)} | {field.description} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    if field.default is None:
        return ""
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    if value in ("", (), {}):
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    print(render(), end="")
