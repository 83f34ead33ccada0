"""Turning JSON bytes into a wire message, or into an error that names the field at fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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
        elif "[" not in step and "-" not in step and step not in _UNION_TAGS:
            path += f".{step}" if path else step
    return path


_UNION_TAGS = frozenset(
    {"str", "int", "float", "bool", "text", "image_url", "TextPart", "ImagePart"}
)


def parse(kind: type[MessageT], body: bytes) -> MessageT:
    """Parse `body` as a `kind`.

    Raises:
        BadRequestError: the body is not JSON, or a field is missing or wrong; `param` names it.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        raise bad_request(exc.errors(include_url=False, include_input=False)) from None


def bad_request(errors: Sequence[ErrorDetails]) -> BadRequestError:
    """The first and deepest of pydantic's complaints, as one sentence."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequestError(f"the request body is not valid JSON: {first['msg']}")
    # A union reports every branch; the deepest complaint is about the branch that was meant.
    worst = max(errors, key=lambda error: len(error["loc"]))
    path = field_path(worst["loc"])
    message = worst["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not path:
        return BadRequestError(message)
    return BadRequestError(f"{path}: {message}", param=path)
