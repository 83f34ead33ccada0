"""What refused clients are told: why, and when to come back."""

from __future__ import annotations

import math

from epd.coordinator.admission.estimate import Wait
from epd.coordinator.admission.ticket import Ticket
from epd.errors import DeadlineError, EPDError, OverloadedError, RateLimitedError
from epd.types import RequestClass

_MAX_RETRY_S = 600.0


def retry_after_s(backlog_s: float | None) -> float:
    """Whole seconds after which a backlog is gone; 1 if it is not known."""
    return float(min(_MAX_RETRY_S, max(1, math.ceil(backlog_s or 0))))


def full_house(max_in_flight: int, backlog_s: float | None) -> OverloadedError:
    """Too many requests are served at once, and none of them would make way."""
    return OverloadedError(
        f"{max_in_flight} requests are in flight already; retry shortly",
        retry_after_s=retry_after_s(backlog_s),
    )


def full_share(num: int, backlog_s: float | None) -> RateLimitedError:
    """A tenant has most of all places, and the last ones are for others."""
    return RateLimitedError(
        f"{num} of your requests are in flight, more than half of what is served at once: have "
        "fewer in flight, and retry after the time in Retry-After",
        retry_after_s=retry_after_s(backlog_s),
    )


def full_queue(
    request_class: RequestClass, num: int, backlog_s: float | None, *, is_own_load: bool
) -> EPDError:
    """The queue of a class is full, with as many of this tenant as is its share or more."""
    if is_own_load:
        return RateLimitedError(
            f"{num} {request_class} requests wait already, yours among them: have fewer in flight "
            "at once, and retry after the time in Retry-After",
            retry_after_s=retry_after_s(backlog_s),
        )
    return OverloadedError(
        f"{num} {request_class} requests wait already: retry after the time in Retry-After",
        retry_after_s=retry_after_s(backlog_s),
    )


def made_way(ticket: Ticket, backlog_s: float | None) -> RateLimitedError:
    """A request of the tenant with most of a full queue, for one of another."""
    return RateLimitedError(
        f"the queue of {ticket.request_class} requests is full, and most of it is yours: have "
        "fewer in flight at once, and retry after the time in Retry-After",
        retry_after_s=retry_after_s(backlog_s),
    )


def made_way_for_interactive(backlog_s: float | None) -> OverloadedError:
    """A batch request that waited, when there were too many requests."""
    return OverloadedError(
        "interactive requests leave no room for batch: retry after the time in Retry-After",
        retry_after_s=retry_after_s(backlog_s),
    )


def hopeless(ticket: Ticket, wait: Wait, remaining_s: float) -> EPDError:
    """The first token would come later than is wanted."""
    error, why = OverloadedError, "the workers are overloaded"
    if wait.without_others_s > remaining_s:
        error, why = RateLimitedError, "your own requests before it are too many"
    can_wait = ticket.request_class is RequestClass.INTERACTIVE
    hint = ", or send it as batch if it can wait" if can_wait else ""
    return error(
        f"the first token would take about {wait.total_s:.0f} s, not {max(0.0, remaining_s):.0f} s "
        f"as it should, as {why}: retry after the time in Retry-After{hint}",
        retry_after_s=retry_after_s(wait.total_s - remaining_s),
    )


def expired(deadline_s: float, backlog_s: float) -> DeadlineError:
    """Its turn did not come before its deadline."""
    return DeadlineError(
        f"the request was ended: its turn did not come within {deadline_s:g} s, as the workers are "
        "overloaded; retry after the time in Retry-After",
        retry_after_s=retry_after_s(backlog_s),
    )
