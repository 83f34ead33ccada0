"""Questions to a running SGLang server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

from epd.types import Stage

PROBE_TIMEOUT_S = 5.0


class Probe(Protocol):
    """What supervision asks of a server."""

    async def is_ready(self) -> bool:
        """Whether it has done a first piece of work; False while it loads the model."""
        ...

    async def ask(self) -> tuple[bool, Mapping[str, Any] | None]:
        """(whether it answered in time, its loads if the stage has any)."""
        ...


class HTTPProbe:
    """Asks over HTTP.

    Args:
        session: the worker's.
        url: the server.
        stage: which of SGLang's servers it is; the encode server has no `/v1/loads`.
        timeout_s: how long one answer may take.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, stage: Stage, *, timeout_s: float
    ) -> None:
        self._session = session
        self._url = url
        self._stage = stage
        self._timeout_s = timeout_s

    async def is_ready(self) -> bool:
        # Does a real piece of work (one token, one small image), so that ready means ready.
        status, _ = await self._get("/health", 3 * self._timeout_s)
        return status == 200

    async def ask(self) -> tuple[bool, Mapping[str, Any] | None]:
        if self._stage is Stage.ENCODE:
            # While it encodes for others it answers at once; only an idle one encodes for this.
            status, _ = await self._get("/health", self._timeout_s)
            return status == 200, None
        status, body = await self._get("/v1/loads", self._timeout_s)
        if status != 200:
            return False, None
        try:
            loads = json.loads(body)
        except ValueError:
            return False, None
        return isinstance(loads, dict), loads if isinstance(loads, dict) else None

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """(status, body); status 0 if there was no answer in time."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(self._url + path) as response,
            ):
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return 0, b""
