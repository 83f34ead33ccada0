"""A worker's Prometheus metrics, in a registry of its own.

Gauges read the true state when they are scraped, so they cannot drift from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epd.errors import AbortedError

_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class WorkerMetrics:
    """The metrics of every stage; one that does not apply to a stage stays absent or 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._gauges: dict[str, Gauge] = {}
        self.requests = Counter(
            "epd_worker_requests",
            "Requests that ended at this worker, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.embedding_bytes = Counter(
            "epd_embedding_bytes_moved",
            "Bytes of image embeddings handed from encode to prefill",
            ["role"],
            registry=registry,
        )
        self.kv_bytes = Counter(
            "epd_kv_bytes_moved",
            "Bytes of KV cache handed from prefill to decode",
            ["role"],
            registry=registry,
        )
        self.encodes = Counter(
            "epd_encodes", "Images that went through the vision tower", registry=registry
        )
        self.cache_hits = Counter(
            "epd_embedding_cache_hits",
            "Images whose embeddings were there or under way already",
            registry=registry,
        )
        self.step_seconds = Histogram(
            "epd_step_seconds",
            "Time of one computation step: a batch of images, a prompt chunk or a decode step",
            ["step"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )

    def gauge(self, name: str, help_text: str, read: Callable[[], float], **labels: str) -> None:
        """Publish `read()`, called at each scrape, as a gauge."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, help_text, list(labels), registry=self.registry)
            self._gauges[name] = gauge
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def arena_gauges(
        self, arena: str, *, used_bytes: Callable[[], float], pinned_bytes: Callable[[], float]
    ) -> None:
        """Publish how full an arena is, and how much of that a running request needs."""
        self.gauge(
            "epd_arena_used_bytes",
            "Bytes of an arena that hold something, cached or needed",
            used_bytes,
            arena=arena,
        )
        self.gauge(
            "epd_arena_pinned_bytes",
            "Bytes of an arena that a running request needs",
            pinned_bytes,
            arena=arena,
        )

    @contextmanager
    def outcome(self) -> Generator[None]:
        """Count the request whose handler this surrounds as finished, failed or aborted."""
        try:
            yield
        except (AbortedError, asyncio.CancelledError):
            self.requests.labels("aborted").inc()
            raise
        except BaseException:
            self.requests.labels("failed").inc()
            raise
        self.requests.labels("finished").inc()
