from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from epd.auth import ClusterToken
from epd.engines.shell import Identity
from epd.errors import AuthenticationError
from epd.types import Stage
from epd.wire import ModelCard, WorkerReport

TOKEN = ClusterToken("a-token-for-tests-only")
IDENTITY = Identity(
    worker_id="w1",
    epoch=1,
    stage=Stage.DECODE,
    engine="torch",
    url="http://127.0.0.1:1",
    model=ModelCard(model_id="m", model_type="qwen2_vl", context_tokens=128),
)


class FakeRegistry:
    """A coordinator's registration endpoint that remembers the reports it got."""

    def __init__(self, *, token: ClusterToken = TOKEN, heartbeat_s: float = 0.05) -> None:
        self.reports: list[WorkerReport] = []
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_put("/internal/workers/{worker_id}", self._put)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def wait_for(self, wanted: Any, timeout_s: float = 5.0) -> WorkerReport:
        """The first report, of those that came and those to come, for which `wanted` is true."""
        async with asyncio.timeout(timeout_s), self._arrived:
            while True:
                for report in self.reports:
                    if wanted(report):
                        return report
                await self._arrived.wait()

    async def _put(self, request: web.Request) -> web.Response:
        try:
            self._token.check(request.headers.get("Authorization"))
        except AuthenticationError:
            return web.json_response({"error": {"message": "no"}}, status=401)
        report = WorkerReport.model_validate_json(await request.read())
        async with self._arrived:
            self.reports.append(report)
            self._arrived.notify_all()
        return web.json_response(
            {"heartbeat_s": self._heartbeat_s, "lease_s": 5.0, "encoder_paths": ["/enc/0"]}
        )
