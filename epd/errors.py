"""The error tree: every failure EPD reports to a client, a peer or a terminal.

    EPDError                      status, retryable, code
    ├── BadRequestError           400  the client's request is wrong; names the field
    │   ├── UnknownModelError     404
    │   ├── MediaError            400  an image that cannot be fetched or read
    │   ├── ContextLengthError    400  the prompt is longer than the model's context
    │   └── TooLargeError         413  the request body is over the limit
    ├── AuthenticationError       401  no or wrong key
    ├── ForbiddenError            403  the key is known, and may not do this
    ├── RateLimitedError          429  the client sends more than its share; retry later
    ├── OverloadedError           503  no room now; retry later
    ├── NoWorkerError             503  a stage has no live worker
    ├── DeadlineError             504  a stage made no progress in time
    ├── AbortedError              499  the client or an operator cancelled the request
    ├── WorkerError               502  a worker failed or vanished
    │   ├── TransferError         502  a hand-off of embeddings or KV failed
    │   └── UnreachableError      502  no connection could be made: the call was not heard
    ├── ConfigError               -    a config file, option or environment that cannot work
    └── DependencyError           -    an optional package or system library is missing

`to_dict` and `from_dict` carry an error over HTTP in OpenAI's error shape, so that a worker's
error reaches the client with its type, field and status intact.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class EPDError(Exception):
    """Base of all EPD errors.

    Attributes:
        status: HTTP status when the error reaches a client.
        retryable: whether the same request may succeed on another worker or later.
        code: short machine-readable name, the `code` of OpenAI's error shape.
        error_type: the `type` of OpenAI's error shape.
        param: the request field at fault, if there is one.
        retry_after_s: hint for the client, sent as `Retry-After`.
    """

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """The error in OpenAI's shape: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequestError(EPDError):
    status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"


class UnknownModelError(BadRequestError):
    status = 404
    code = "model_not_found"


class MediaError(BadRequestError):
    code = "invalid_image"


class ContextLengthError(BadRequestError):
    code = "context_length_exceeded"


class TooLargeError(BadRequestError):
    status = 413
    code = "request_too_large"


class AuthenticationError(EPDError):
    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class ForbiddenError(EPDError):
    status = 403
    code = "forbidden"
    error_type = "permission_error"


class RateLimitedError(EPDError):
    status = 429
    retryable = True
    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"


class OverloadedError(EPDError):
    status = 503
    retryable = True
    code = "overloaded"


class NoWorkerError(EPDError):
    status = 503
    retryable = True
    code = "no_worker"


class DeadlineError(EPDError):
    status = 504
    retryable = True
    code = "deadline_exceeded"


class AbortedError(EPDError):
    status = 499
    code = "aborted"


class WorkerError(EPDError):
    status = 502
    retryable = True
    code = "worker_failed"


class TransferError(WorkerError):
    code = "transfer_failed"


class UnreachableError(WorkerError):
    code = "worker_unreachable"


class ConfigError(EPDError):
    code = "invalid_config"


class DependencyError(EPDError):
    code = "missing_dependency"


def _tree(root: type[EPDError]) -> dict[str, type[EPDError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_dict(body: object, status: int) -> EPDError:
    """Rebuild a peer's error from its JSON body, falling back on the HTTP status.

    A body that is not OpenAI's error shape (SGLang uses several) still gives an error of the
    right family: 4xx a `BadRequestError`, anything else a `WorkerError`. So does a peer's internal
    error: to whoever called it, it is a worker that failed.
    """
    detail: Any = body
    if isinstance(body, dict):
        detail = body.get("error", body)  # pyright: ignore[reportUnknownMemberType]
    message, param, code = str(detail), None, None
    if isinstance(detail, dict):
        message = str(detail.get("message") or detail.get("detail") or detail)
        param, code = detail.get("param"), detail.get("code")
    kind = _tree(EPDError).get(str(code))
    if kind is None or kind is EPDError:
        kind = BadRequestError if 400 <= status < 500 else WorkerError
    return kind(message, param=param if isinstance(param, str) else None)


def leaves(group: BaseExceptionGroup[ErrorT]) -> list[ErrorT]:
    """The errors of a failed task group, groups within it taken apart; at least one, in order."""
    found: list[ErrorT] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
