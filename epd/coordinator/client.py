"""HTTP from the coordinator to workers: one shared session, one translation of failures."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import aiohttp

from epd.auth import ClusterToken
from epd.errors import (
    BadRequestError,
    DeadlineError,
    EPDError,
    OverloadedError,
    WorkerError,
    from_dict,
)
from epd.pools.registry import Registry, Worker
from epd.waiting import unless

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
_LARGE_BYTES = 2**20


class WorkerClient:
    """Calls workers, and tells the registry about those that cannot be reached."""

    def __init__(
        self, session: aiohttp.ClientSession, registry: Registry, token: ClusterToken
    ) -> None:
        self._session = session
        self._registry = registry
        self._headers = {
            **token.headers,
            "Content-Type": "application/json",
            # Answers are relayed as they come, so nobody may compress them on the way.
            "Accept-Encoding": "identity",
        }

    async def open(self, worker: Worker, path: str, body: bytes) -> aiohttp.ClientResponse:
        """POST and return the response once its headers are here; the caller releases it.

        Raises:
            WorkerError: the worker cannot be reached or broke the connection.
            EPDError: the worker answered with an error.
        """
        try:
            response = await self._session.post(
                # A redirect would take the cluster token to wherever it points.
                worker.url + path,
                # Bytes of a MiB and more would be written in one go; a stream is written in pieces.
                data=body if len(body) < _LARGE_BYTES else io.BytesIO(body),
                headers=self._headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as exc:
            raise self._broken(worker, exc) from exc
        if response.status >= 300:
            async with response:
                raise _refusal(worker, response.status, await self.read(worker, response))
        return response

    async def read(self, worker: Worker, response: aiohttp.ClientResponse) -> bytes:
        """The whole body of an open response.

        Raises:
            WorkerError: the worker broke the connection.
        """
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as exc:
            raise self._broken(worker, exc) from exc

    async def read_some(self, worker: Worker, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes of an open response as soon as there are any; empty at its end.

        Raises:
            WorkerError: the worker broke the connection.
        """
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as exc:
            raise self._broken(worker, exc) from exc

    async def post(
        self, worker: Worker, path: str, body: bytes, *, timeout_s: float
    ) -> dict[str, Any]:
        """POST and return the whole JSON answer.

        Raises:
            WorkerError, EPDError: as `open`; also once the worker's lease lapses.
            DeadlineError: no answer within `timeout_s`.
        """
        answer = await unless(worker.lost.wait(), self._post(worker, path, body, timeout_s))
        if answer is None:
            raise worker.loss
        return answer

    async def abort(self, worker: Worker, request_id: str) -> bool:
        """Tell a worker to drop a request. Returns whether it acknowledged."""
        body = json.dumps({"rid": request_id}).encode()
        try:
            await self._post(worker, "/abort_request", body, ABORT_TIMEOUT_S)
        except EPDError as exc:
            # A worker that died holds nothing; one that hangs frees it when its own lease ends.
            logger.warning(
                "abort not acknowledged: %s",
                exc,
                extra={"request_id": request_id, "worker_id": worker.worker_id},
            )
            return False
        return True

    async def _post(
        self, worker: Worker, path: str, body: bytes, timeout_s: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                async with await self.open(worker, path, body) as response:
                    answer = _decode(await self.read(worker, response))
        except TimeoutError:
            raise DeadlineError(f"{worker}: no answer to {path} in {timeout_s:g} s") from None
        return answer if isinstance(answer, dict) else {}

    def _broken(self, worker: Worker, cause: BaseException) -> WorkerError:
        """The error for a connection to `worker` that failed; the worker becomes suspect."""
        self._registry.suspect(worker)
        never_met = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
        what = "cannot be reached" if isinstance(cause, never_met) else "vanished"
        return WorkerError(f"{worker} {what}")


def _refusal(worker: Worker, status: int, body: bytes) -> EPDError:
    """The error behind a worker's answer of status >= 300."""
    if status in (401, 403):
        return WorkerError(f"{worker} refused this coordinator's cluster token: share one")
    error = from_dict(_decode(body), status)
    if status == 429:
        return OverloadedError(f"{worker} is busy; retry shortly", retry_after_s=1.0)
    # These say that the worker speaks another contract, not that the client asked wrongly.
    if status in (404, 405) and type(error) is BadRequestError:
        return WorkerError(f"{worker} answered {status}: {error.message}")
    return error


def _decode(body: bytes) -> object:
    try:
        return json.loads(body) if body else {}
    except ValueError:
        return body.decode(errors="replace")[:500]
