"""Turning JSON bytes into a wire message, or into an error that names the field at fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd.errors import BadRequestError

MessageT = TypeVar("MessageT", bound=BaseModel)


def field_path(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content")` as a reader writes it: `messages[0].content`.

    Names of union branches, which pydantic adds to a location, are left out.
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "str" and "[" not in step and ":" not in step:
            path += f".{step}" if path else step
    return path


def load_json(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        BadRequestError: the body is not JSON, or not an object.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise BadRequestError(f"the request body is not valid JSON: {exc}") from None
    if not isinstance(document, dict):
        raise BadRequestError("the request body must be a JSON object")
    return cast(dict[str, Any], document)


def _refuse_constant(name: str) -> None:
    # Python reads and writes NaN and Infinity, but they are no JSON: a peer may choke on them.
    raise ValueError(f"{name} is no JSON number")


def parse(kind: type[MessageT], document: bytes | dict[str, Any]) -> MessageT:
    """Validate a JSON body, or one already decoded, as a `kind`.

    Raises:
        BadRequestError: the body is not JSON, or a field is missing or wrong; `param` names it.
    """
    if isinstance(document, bytes):
        document = load_json(document)
    try:
        return kind.model_validate(document)
    except ValidationError as exc:
        raise _bad_request(exc.errors(include_url=False, include_input=False)) from None


def _bad_request(errors: Sequence[ErrorDetails]) -> BadRequestError:
    """The first and deepest of pydantic's complaints, as one sentence."""
    # A union reports every branch; the deepest complaint is about the branch that was meant.
    worst = max(errors, key=lambda error: len(error["loc"]))
    path = field_path(worst["loc"])
    message = worst["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not path:
        return BadRequestError(message)
    return BadRequestError(f"{path}: {message}", param=path)
