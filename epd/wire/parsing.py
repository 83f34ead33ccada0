"""Turning JSON bytes into a wire message, or into an error that names the field at fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd.errors import BadRequestError, TooLargeError

MessageT = TypeVar("MessageT", bound=BaseModel)

_MAX_VALUES = 2**18


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


class _PatientDecoder(json.JSONDecoder):
    """Goes from value to value in Python; only within a string it keeps other threads waiting.

    The decoder in C lets none of them run before the end of the body.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = py_make_scanner(self)


def load_json(body: bytes | bytearray, *, is_patient: bool = False) -> dict[str, Any]:
    """Decode a JSON object.

    Args:
        body: UTF-8.
        is_patient: let other threads run meanwhile; slower, for use in a thread.

    Raises:
        BadRequestError: the body is not JSON, or not an object.
        TooLargeError: it has so many values that they would take many times its size in memory.
    """
    _check_values(body)
    decoder = _PatientDecoder if is_patient else json.JSONDecoder
    try:
        document = json.loads(body, cls=decoder, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise BadRequestError(f"the request body is not valid JSON: {exc}") from None
    if not isinstance(document, dict):
        raise BadRequestError("the request body must be a JSON object")
    return cast(dict[str, Any], document)


def dump_json(document: dict[str, Any], *, is_patient: bool = False) -> bytes:
    """Encode what `load_json` gave; `is_patient` as there.

    Raises:
        BadRequestError: it is no JSON that a peer could read, although Python could.
    """
    encoder = json.JSONEncoder(allow_nan=False)
    try:
        text = "".join(encoder.iterencode(document)) if is_patient else encoder.encode(document)
    except RecursionError:
        raise BadRequestError("the request body is nested too deeply") from None
    except ValueError:
        raise BadRequestError("the request body holds a number that is out of range") from None
    return text.encode()


def _check_values(body: bytes | bytearray) -> None:
    """Refuse what is small on the wire and large in memory: `{},` has 3 bytes and becomes 72."""
    if _num_marks(body) <= _MAX_VALUES:
        return
    # Most may be in texts. With what is escaped gone, each quote begins or ends a string.
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    has_few_strings = bare.count(b'"') <= 2 * _MAX_VALUES
    if not has_few_strings or sum(map(_num_marks, bare.split(b'"')[::2])) > _MAX_VALUES:
        raise TooLargeError(f"the request body has more than the {_MAX_VALUES} values allowed")


def _num_marks(text: bytes | bytearray) -> int:
    """At least the number of values, if `text` is JSON without its strings."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


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
