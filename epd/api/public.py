"""What clients and monitoring may see besides chat: models, health, readiness, metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from epd.coordinator.coordinator import Coordinator
from epd.errors import NoWorkerError, OverloadedError, UnknownModelError
from epd.types import WorkerState
from epd.wire import ModelCard


class PublicEndpoints:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`: what ready workers serve, in OpenAI's shape."""
        data = [_model(card) for card in self._served().values()]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{model}`: one of them."""
        model_id = request.match_info["model"]
        card = self._served().get(model_id)
        if card is None:
            raise UnknownModelError(f"no ready worker serves {model_id!r}", param="model")
        return web.json_response(_model(card))

    def _served(self) -> dict[str, ModelCard]:
        return {
            worker.report.model.model_id: worker.report.model
            for worker in self._coordinator.registry.all()
            if worker.state is WorkerState.READY
        }

    async def health(self, _: web.Request) -> web.Response:
        """`GET /health`: this process is alive."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """`GET /ready`: new requests are taken, and each stage has a ready worker."""
        if self._coordinator.is_draining:
            raise OverloadedError("the coordinator is shutting down", retry_after_s=5.0)
        missing = self._coordinator.registry.missing_stages()
        if missing:
            raise NoWorkerError(f"no ready worker for: {', '.join(missing)}", retry_after_s=1.0)
        return web.json_response({"status": "ready"})

    async def metrics(self, _: web.Request) -> web.Response:
        """`GET /metrics`: Prometheus text."""
        body = generate_latest(self._coordinator.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _model(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "epd",
        "max_model_len": card.context_tokens,
    }
