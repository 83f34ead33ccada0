"""The coordinator's Prometheus metrics. Names follow Prometheus' rules; units are in the name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from epd.types import Stage

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip


class CoordinatorMetrics:
    """What the coordinator counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "epd_requests_total",
            "Chat requests that ended, by outcome (finished, failed, aborted) and status",
            ["outcome", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "epd_requests_in_flight", "Chat requests accepted and not ended", registry=registry
        )
        self.rooms_open = Gauge(
            "epd_rooms_in_flight", "Bootstrap rooms minted and not closed", registry=registry
        )
        self.ttft = Histogram(
            "epd_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            "epd_time_per_output_token_seconds",
            "Mean time between a request's tokens, the first not counted",
            buckets=_SECONDS,
            registry=registry,
        )
        self.e2e = Histogram(
            "epd_request_duration_seconds",
            "From the request's arrival to its end",
            buckets=_SECONDS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "epd_stage_duration_seconds",
            "Duration of each step of a request, as its worker measured it",
            ["step"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.handoff_bytes = Counter(
            "epd_handoff_bytes_total",
            "Bytes moved worker to worker by the transfer engine, as workers reported them",
            ["step"],
            registry=registry,
        )
        self.retries = Counter(
            "epd_retries_total",
            "Attempts that failed and were followed by another on other workers, by error",
            ["code"],
            registry=registry,
        )
        self.admission_wait = Histogram(
            "epd_admission_wait_seconds",
            "From the time a request was read to its turn, or to its end without one",
            ["request_class"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.rejected = Counter(
            "epd_requests_rejected_total",
            "Requests that got no turn, by reason (queue_full, too_late, displaced, deadline)",
            ["request_class", "reason"],
            registry=registry,
        )
        self.image_tokens = Counter(
            "epd_image_tokens_total", "Image tokens of accepted requests", registry=registry
        )

    def watch(
        self,
        *,
        workers: Callable[[], Iterable[tuple[str, str]]],
        open_breakers: Callable[[], Iterable[str]],
        encode_parts: Callable[[], int],
        media_cache_bytes: Callable[[], int],
        body_bytes: Callable[[], int],
        queue_lengths: Callable[[], Iterable[tuple[str, int]]],
        backlogs: Callable[[], Iterable[tuple[str, float]]],
    ) -> None:
        """Add gauges that are read when scraped.

        Args:
            workers: (stage, state) of each known worker.
            open_breakers: stage of each worker that gets no work as it kept failing.
            encode_parts: image parts placed and not closed.
            media_cache_bytes: bytes held by the media cache.
            body_bytes: bytes of the request bodies that are held.
            queue_lengths: requests that wait, by class.
            backlogs: seconds of work by stage.
        """
        self.registry.register(
            _Snapshot(workers, open_breakers, encode_parts, media_cache_bytes, body_bytes)
        )
        self.registry.register(_AdmissionSnapshot(queue_lengths, backlogs))


class _Snapshot(Collector):
    def __init__(
        self,
        workers: Callable[[], Iterable[tuple[str, str]]],
        open_breakers: Callable[[], Iterable[str]],
        encode_parts: Callable[[], int],
        media_cache_bytes: Callable[[], int],
        body_bytes: Callable[[], int],
    ) -> None:
        self._workers = workers
        self._open_breakers = open_breakers
        self._encode_parts = encode_parts
        self._media_cache_bytes = media_cache_bytes
        self._body_bytes = body_bytes

    def collect(self) -> Iterable[GaugeMetricFamily]:
        counts: dict[tuple[str, str], int] = {}
        for key in self._workers():
            counts[key] = counts.get(key, 0) + 1
        family = GaugeMetricFamily("epd_workers", "Known workers", labels=["stage", "state"])
        for key, count in sorted(counts.items()):
            family.add_metric(list(key), count)
        yield family
        family = GaugeMetricFamily(
            "epd_circuit_breakers_open",
            "Workers that get no work, or one request on trial, as they kept failing",
            labels=["stage"],
        )
        open_breakers = list(self._open_breakers())
        for stage in Stage:
            family.add_metric([stage.value], open_breakers.count(stage.value))
        yield family
        yield GaugeMetricFamily(
            "epd_encode_parts_in_flight",
            "Image parts placed and not closed",
            value=self._encode_parts(),
        )
        yield GaugeMetricFamily(
            "epd_media_cache_bytes", "Bytes of media held", value=self._media_cache_bytes()
        )
        yield GaugeMetricFamily(
            "epd_request_bytes_in_flight",
            "Bytes of request bodies held",
            value=self._body_bytes(),
        )


class _AdmissionSnapshot(Collector):
    def __init__(
        self,
        queue_lengths: Callable[[], Iterable[tuple[str, int]]],
        backlogs: Callable[[], Iterable[tuple[str, float]]],
    ) -> None:
        self._queue_lengths = queue_lengths
        self._backlogs = backlogs

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "epd_admission_queue_length", "Requests that wait", labels=["request_class"]
        )
        for name, length in self._queue_lengths():
            family.add_metric([name], length)
        yield family
        family = GaugeMetricFamily(
            "epd_backlog_in_flight_seconds",
            "Work given to a stage or waiting for it, at its measured speed; 0 if not measured",
            labels=["stage"],
        )
        for stage, seconds in self._backlogs():
            family.add_metric([stage], seconds)
        yield family
