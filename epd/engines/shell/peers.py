"""Calls from a worker to the coordinator and other workers: JSON out, a message or error in."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Literal, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from epd.auth import ClusterToken
from epd.errors import (
    BadRequestError,
    DeadlineError,
    EPDError,
    UnreachableError,
    WorkerError,
    from_dict,
)

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=BaseModel)


class PeerClient:
    """Speaks to peers with the cluster token over one shared session."""

    def __init__(self, session: aiohttp.ClientSession, token: ClusterToken) -> None:
        self.session = session
        self._headers = token.headers

    async def call(
        self,
        method: Literal["GET", "POST", "PUT"],
        url: str,
        answer: type[MessageT],
        *,
        peer: str,
        message: BaseModel | None = None,
        timeout_s: float,
    ) -> MessageT:
        """Send `message` and parse the answer as `answer`.

        Cancellation closes the connection, which cancels the peer's handler. Errors name `peer`
        ("the prefill worker") and never the URL, which may carry a capability and reaches clients.

        Raises:
            EPDError: the peer's own error with its status and param; DeadlineError after
                `timeout_s`; UnreachableError when it cannot have heard the call, WorkerError
                when the connection broke later or the answer makes no sense.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        data = message.model_dump_json().encode() if message is not None else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                body = await response.read()
                status = response.status
        except TimeoutError as exc:
            raise DeadlineError(f"{peer} did not answer in {timeout_s:g} s") from exc
        except aiohttp.ClientConnectorError as exc:
            logger.info("%s cannot be reached: %s", peer, type(exc).__name__)
            raise UnreachableError(f"{peer} cannot be reached") from exc
        except (aiohttp.ClientError, OSError) as exc:
            logger.info("%s broke the connection: %s", peer, type(exc).__name__)
            raise WorkerError(f"{peer} broke the connection") from exc
        if status != 200:
            raise _peer_error(peer, status, body)
        try:
            return answer.model_validate_json(body)
        except ValidationError as exc:
            raise WorkerError(f"{peer} gave an answer that is no {answer.__name__}") from exc


def _peer_error(peer: str, status: int, body: bytes) -> EPDError:
    try:
        detail = json.loads(body)
    except ValueError:
        detail = body[:200].decode(errors="replace") or "no error message"
    error = from_dict(detail, status)
    # It heard us: whom it could not reach in turn is another matter.
    if isinstance(error, UnreachableError):
        return WorkerError(error.message)
    # These say that the cluster is set up wrongly, not that the client's request is bad.
    if status in (401, 403):
        return WorkerError(f"{peer} refused this worker's cluster token: both must share one")
    if status in (404, 405) and type(error) is BadRequestError:
        return WorkerError(f"{peer} answered {status}: {error.message}")
    return error
