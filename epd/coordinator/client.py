"""HTTP from the coordinator to workers: one shared session, one translation of failures."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp

from epd.auth import ClusterToken
from epd.errors import DeadlineError, WorkerError, from_dict
from epd.pools.registry import Registry, Worker

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0


class WorkerClient:
    """Calls workers, and tells the registry about those that cannot be reached."""

    def __init__(
        self, session: aiohttp.ClientSession, registry: Registry, token: ClusterToken
    ) -> None:
        self._session = session
        self._registry = registry
        self._headers = {**token.headers, "Content-Type": "application/json"}

    async def open(self, worker: Worker, path: str, body: bytes) -> aiohttp.ClientResponse:
        """POST and return the response once its headers are here; the caller releases it.

        Raises:
            WorkerError: the worker cannot be reached or broke the connection.
            EPDError: the worker answered with an error.
        """
        try:
            response = await self._session.post(worker.url + path, data=body, headers=self._headers)
        except (aiohttp.ClientError, OSError) as exc:
            raise self.broken(worker, exc) from exc
        if response.status >= 400:
            try:
                raise from_dict(await _json(response), response.status)
            except (aiohttp.ClientError, OSError) as exc:
                raise self.broken(worker, exc) from exc
            finally:
                response.release()
        return response

    async def post(
        self, worker: Worker, path: str, body: bytes, *, timeout_s: float
    ) -> dict[str, Any]:
        """POST and return the whole JSON answer.

        Raises:
            WorkerError, EPDError: as `open`.
            DeadlineError: no answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.open(worker, path, body)
                async with response:
                    answer = await _json(response)
        except TimeoutError:
            raise DeadlineError(f"{worker}: no answer to {path} in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as exc:
            raise self.broken(worker, exc) from exc
        return answer if isinstance(answer, dict) else {}

    async def abort(self, worker: Worker, request_id: str) -> bool:
        """Tell a worker to drop a request. Returns whether it acknowledged."""
        try:
            await self.post(
                worker,
                "/abort_request",
                json.dumps({"rid": request_id}).encode(),
                timeout_s=ABORT_TIMEOUT_S,
            )
        except (WorkerError, DeadlineError) as exc:
            # A worker that died holds nothing; one that hangs frees it when its own lease ends.
            logger.warning(
                "abort not acknowledged: %s",
                exc,
                extra={"request_id": request_id, "worker_id": worker.worker_id},
            )
            return False
        return True

    def broken(self, worker: Worker, cause: BaseException) -> WorkerError:
        """The error for a connection to `worker` that failed; the worker becomes suspect."""
        self._registry.suspect(worker)
        what = (
            "cannot be reached" if isinstance(cause, aiohttp.ClientConnectorError) else "vanished"
        )
        return WorkerError(f"{worker} {what}")


async def _json(response: aiohttp.ClientResponse) -> object:
    body = await response.read()
    try:
        return json.loads(body) if body else {}
    except ValueError:
        return body.decode(errors="replace")[:500]
