"""The coordinator's admin API, seen from a client: who works, and what became of a request.

Called by `epd status`, `epd up` and `epd demo`. It needs the cluster token.
"""

from __future__ import annotations

import json
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from epd.auth import ClusterToken
from epd.errors import WorkerError, from_dict
from epd.types import Stage

_TIMEOUT_S = 10.0


AnswerT = TypeVar("AnswerT", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class WorkerLoad(_Answer):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


class WorkerStatus(_Answer):
    """One worker as the coordinator sees it."""

    worker_id: str
    stage: Stage
    engine: str
    state: str
    is_left_alone: bool = False
    """Its circuit breaker is open: it kept failing, and gets no work for a while."""
    can_continue: bool = False
    """Whether it can go on with an answer that another worker began."""
    url: str
    pid: int | None = None
    age_s: float
    """Since its last report."""
    model_id: str
    load: WorkerLoad = WorkerLoad()


class TimelineSpan(_Answer):
    """One step of a request, as the process that did it measured it."""

    name: str
    worker_id: str | None = None
    start_unix_s: float
    duration_s: float
    nbytes: int = 0
    num_tokens: int = 0


class RequestTimeline(_Answer):
    """What became of one request, and where its time went."""

    request_id: str
    outcome: str | None = None
    created_unix_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    num_prompt_tokens: int | None = None
    num_image_tokens: int | None = None
    num_output_tokens: int | None = None
    spans: list[TimelineSpan] = []


class AdminClient:
    """An open connection to one coordinator; use as `async with`."""

    def __init__(self, url: str, token: ClusterToken) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._token.headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def workers(self) -> list[WorkerStatus]:
        """All workers known to the coordinator.

        Raises:
            WorkerError: the coordinator cannot be reached or does not answer in time.
            EPDError: it refused; the error is the coordinator's.
        """
        answer = await self._get("/admin/workers")
        return [self._parse(WorkerStatus, worker) for worker in answer.get("workers", [])]

    async def request(self, request_id: str) -> RequestTimeline:
        """The timeline of a request; raises as `workers`."""
        return self._parse(RequestTimeline, await self._get(f"/admin/requests/{request_id}"))

    def _parse(self, kind: type[AnswerT], document: object) -> AnswerT:
        try:
            return kind.model_validate(document)
        except ValidationError as exc:
            raise WorkerError(f"the answer of {self._url} is not understood: {exc}") from exc

    async def _get(self, path: str) -> dict[str, Any]:
        assert self._session is not None, "use AdminClient as a context manager"
        try:
            # A redirect would take the cluster token to wherever it points.
            async with self._session.get(self._url + path, allow_redirects=False) as response:
                body = await response.read()
                document = _json(body)
                if response.status >= 400:
                    raise from_dict(document or body.decode(errors="replace"), response.status)
        except TimeoutError as exc:
            raise WorkerError(f"no answer from {self._url} within {_TIMEOUT_S:.0f} s") from exc
        except aiohttp.ClientError as exc:
            raise WorkerError(f"no coordinator can be reached at {self._url}: {exc}") from exc
        if document is None:
            raise WorkerError(f"{self._url} answered something else: is it an EPD coordinator?")
        return document


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
