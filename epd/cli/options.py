"""Command-line options made from the configuration schema.

An option has the name, default and help text of its field, so that the schema states each of them
once. Values stay strings here: the schema parses them, and its errors name the option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from epd.config.reference import listed_section, type_name

ParentPid = Annotated[int | None, typer.Option(hidden=True, help="Leave when this process dies.")]

Command = Callable[..., None]


def takes_fields_of(kind: type[BaseModel]) -> Callable[[Command], Command]:
    """Give a command an option for each field of `kind` that is not a section of its own.

    The command takes them as `**fields`; those not given on the command line are None.
    """

    def decorate(command: Command) -> Command:
        declared = inspect.signature(command, eval_str=True).parameters.values()
        own = [p for p in declared if p.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = sorted(kind.model_fields.items(), key=lambda item: not item[1].is_required())
        parameters = [_parameter(name, field) for name, field in fields if not _is_section(field)]
        parameters += own
        # typer reads a command's options from its signature.
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _is_section(field: FieldInfo) -> bool:
    kind = field.annotation
    is_one = isinstance(kind, type) and issubclass(kind, BaseModel)
    return is_one or listed_section(kind) is not None


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    default = field.get_default()
    note = " (required)" if field.is_required() else f" (default {default})" if default else ""
    # Given as None, so that an option left out does not hide the value of a file.
    if field.annotation is bool:
        kind, metavar = bool, None
    elif get_origin(field.annotation) is dict:
        # One entry each time it is given.
        kind, metavar = list[str], "NAME=VALUE"
    else:
        kind, metavar = str, _metavar(field)
    option = typer.Option(flag, metavar=metavar, help=f"{field.description}{note}")
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _metavar(field: FieldInfo) -> str:
    name = type_name(field.annotation)
    plain = {"text": "TEXT", "integer": "INTEGER", "number": "NUMBER", "path": "PATH"}
    return plain.get(name, name.replace(" ", ""))
