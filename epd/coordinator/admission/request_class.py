"""Which class a request is of: what its header asks for, if its key allows it."""

from __future__ import annotations

from epd.auth import Caller
from epd.errors import BadRequestError, ForbiddenError
from epd.types import RequestClass

CLASS_HEADER = "X-EPD-Class"
_BEST_FIRST = list(RequestClass)


def class_of(caller: Caller, wanted: str | None) -> RequestClass:
    """The class of a request.

    Args:
        caller: who sends it.
        wanted: the `X-EPD-Class` header, if there is one.

    Raises:
        BadRequestError: there is no such class.
        ForbiddenError: the caller's key is for requests that are less urgent.
    """
    best = caller.request_class or RequestClass.INTERACTIVE
    if wanted is None:
        return best
    name = wanted.strip().lower()
    if name not in _BEST_FIRST:
        raise BadRequestError(
            f"the header {CLASS_HEADER} names no class: give {' or '.join(_BEST_FIRST)}",
            param=CLASS_HEADER,
        )
    if _BEST_FIRST.index(RequestClass(name)) < _BEST_FIRST.index(best):
        raise ForbiddenError(
            f"this API key is for {best} requests only: leave the header {CLASS_HEADER} out, or "
            f"say {best}",
            param=CLASS_HEADER,
        )
    return RequestClass(name)
