"""The error tree, and how an error travels over HTTP."""

import pytest

from epd import errors
from epd.errors import (
    BadRequestError,
    ContextLengthError,
    EPDError,
    NoWorkerError,
    WorkerError,
    from_dict,
    leaves,
)


def tree(root: type[EPDError]) -> list[type[EPDError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in tree(child))]


OWN = [kind for kind in tree(EPDError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", [kind for kind in OWN if kind is not EPDError])
def test_every_error_survives_the_way_over_http(kind: type[EPDError]) -> None:
    sent = kind("it broke", param="messages[0].content")
    received = from_dict(sent.to_dict(), sent.status)
    assert type(received) is kind
    assert (received.message, received.param) == ("it broke", "messages[0].content")
    assert received.status == sent.status
    assert received.retryable == sent.retryable


def test_a_peers_internal_error_is_a_failed_worker() -> None:
    sent = EPDError("internal error: see the worker's log")
    received = from_dict(sent.to_dict(), sent.status)
    assert type(received) is WorkerError
    assert received.message == sent.message


def test_every_code_names_one_error() -> None:
    codes = [kind.code for kind in OWN]
    assert len(set(codes)) == len(codes)


def test_every_error_is_in_the_picture_of_the_tree() -> None:
    assert errors.__doc__ is not None
    for kind in OWN:
        assert kind.__name__ in errors.__doc__


def test_an_error_has_the_shape_that_openai_clients_read() -> None:
    error = ContextLengthError("too long", param="messages")
    assert error.to_dict() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"error": {"message": "no", "code": "weird"}}, 400, BadRequestError, "no"),
        ({"error": {"message": "no"}}, 500, WorkerError, "no"),
        ({"message": "no", "object": "error"}, 422, BadRequestError, "no"),
        ({"detail": "no"}, 500, WorkerError, "no"),
        ("Internal Server Error", 500, WorkerError, "Internal Server Error"),
        (None, 502, WorkerError, "None"),
        ({"error": "plain text"}, 503, WorkerError, "plain text"),
        ({"error": {"code": "no_worker", "message": "x"}}, 503, NoWorkerError, "x"),
        ([], 400, BadRequestError, "[]"),
    ],
)
def test_a_foreign_body_gives_an_error_of_the_right_family(
    body: object, status: int, kind: type[EPDError], message: str
) -> None:
    error = from_dict(body, status)
    assert type(error) is kind
    assert error.message == message


def test_a_param_that_is_no_text_is_dropped() -> None:
    assert from_dict({"error": {"message": "x", "param": 5}}, 400).param is None


def test_the_leaves_of_nested_groups_come_in_order() -> None:
    a, b, c = EPDError("a"), WorkerError("b"), BadRequestError("c")
    group = ExceptionGroup("", [ExceptionGroup("", [a, ExceptionGroup("", [b])]), c])
    assert leaves(group) == [a, b, c]
