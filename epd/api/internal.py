"""What workers call: reports, media, and the encode gateway's slots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from epd.auth import ClusterToken
from epd.config import CoordinatorConfig
from epd.coordinator.coordinator import Coordinator
from epd.errors import AuthenticationError, BadRequestError, EPDError, MediaError
from epd.wire import LeaseGrant, WorkerReport, parse

_SLOT_SCOPE = "encoder-slots"


class InternalEndpoints:
    def __init__(
        self, coordinator: Coordinator, config: CoordinatorConfig, token: ClusterToken
    ) -> None:
        self._coordinator = coordinator
        self._token = token
        # SGLang calls encoder URLs without credentials, so the path itself carries the right.
        capability = token.sign(_SLOT_SCOPE)
        self._grant = LeaseGrant(
            heartbeat_s=config.lease.heartbeat_s,
            lease_s=config.lease.lease_s,
            encoder_paths=[
                f"/internal/encoders/{capability}/{slot}" for slot in range(config.encoder_slots)
            ],
        )

    async def report(self, request: web.Request) -> web.Response:
        """`PUT /internal/workers/{worker_id}`: registration, heartbeat or farewell."""
        report = parse(WorkerReport, await request.read())
        if report.worker_id != request.match_info["worker_id"]:
            raise BadRequestError("worker_id differs from the path", param="worker_id")
        self._coordinator.take_report(report)
        return web.Response(text=self._grant.model_dump_json(), content_type="application/json")

    async def encoder_urls(self, _: web.Request) -> web.Response:
        """`GET /admin/encoder_urls`: what a prefill server started by others is given."""
        base_url = self._coordinator.base_url
        urls = [base_url + path for path in self._grant.encoder_paths]
        return web.json_response({"encoder_urls": urls})

    async def media(self, request: web.Request) -> web.Response:
        """`GET /internal/media/{content_hash}`: the bytes, to holders of a signed URL."""
        content_hash = request.match_info["content_hash"]
        self._coordinator.media_urls.check(
            content_hash, request.query.get("expires", ""), request.query.get("signature", "")
        )
        item = self._coordinator.media_cache.get(content_hash)
        if item is None:
            raise MediaError("the image is no longer held by the coordinator")
        return web.Response(body=item.data, content_type=item.mime)

    async def slot_health(self, request: web.Request) -> web.Response:
        """`GET {slot}/health`: SGLang probes each encoder URL."""
        self._check(request)
        return web.Response()

    def slot(
        self, call: Callable[[bytes], Awaitable[dict[str, Any]]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler of one encoder call on any slot."""

        async def handle(request: web.Request) -> web.Response:
            self._check(request)
            try:
                return web.json_response(await call(await request.read()))
            except EPDError as error:
                # SGLang reads the message at the top, EPD's own workers in OpenAI's shape.
                body = {**error.to_dict(), "status": "error", "message": error.message}
                return web.json_response(body, status=error.status)

        return handle

    def _check(self, request: web.Request) -> None:
        if not self._token.is_signed(_SLOT_SCOPE, request.match_info["capability"]):
            raise AuthenticationError("not an encoder slot of this coordinator")
