"""What operators call, with the cluster token: workers and request timelines."""

from __future__ import annotations

from aiohttp import web

from epd.clock import Clock
from epd.coordinator.coordinator import Coordinator
from epd.pools.registry import Worker


class AdminEndpoints:
    def __init__(self, coordinator: Coordinator, clock: Clock) -> None:
        self._coordinator = coordinator
        self._clock = clock

    async def workers(self, _: web.Request) -> web.Response:
        """`GET /admin/workers`."""
        self._coordinator.registry.expire()
        workers = [self._describe(worker) for worker in self._coordinator.registry.all()]
        return web.json_response({"workers": workers})

    async def request(self, request: web.Request) -> web.Response:
        """`GET /admin/requests/{request_id}`: the timeline of a running or recent request."""
        record = self._coordinator.log.get(request.match_info["request_id"])
        if record is None:
            raise web.HTTPNotFound(reason="no such request runs or was among the last")
        return web.json_response(record.to_dict())

    def _describe(self, worker: Worker) -> dict[str, object]:
        report = worker.report
        return {
            "worker_id": report.worker_id,
            "stage": report.stage.value,
            "engine": report.engine,
            "state": worker.state.value,
            "is_left_alone": not worker.breaker.is_closed,
            "url": report.url,
            "epoch": report.epoch,
            "pid": report.pid,
            "can_continue": report.can_continue,
            "labels": report.labels,
            "age_s": self._clock.monotonic() - worker.seen_s,
            "model_id": report.model.model_id,
            "num_in_flight": worker.num_in_flight,
            "num_placed": worker.num_placed,
            "load": report.load.model_dump(),
        }
