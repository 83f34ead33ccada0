"""Clients of a running coordinator."""

from epd.sdk.admin import AdminClient, RequestTimeline, TimelineSpan, WorkerLoad, WorkerStatus

__all__ = ["AdminClient", "RequestTimeline", "TimelineSpan", "WorkerLoad", "WorkerStatus"]
