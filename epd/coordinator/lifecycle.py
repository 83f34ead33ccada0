"""One request's life: its states, its timeline, and the log of requests.

    received → resolving → dispatched → streaming → finished
        └──────────┴───────────┴────────────┴─────→ failed | aborted

A request may be dispatched again, to other workers, before it streams.

Every accepted request ends in exactly one of the three last states; a transition not drawn here is
a bug and raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from epd.clock import Clock
from epd.config import RequestConfig
from epd.types import RequestClass, RequestId, Stage
from epd.wire import Span


class RequestState(StrEnum):
    RECEIVED = "received"
    RESOLVING = "resolving"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_end(self) -> bool:
        return self in _ENDS


_ENDS = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.ABORTED})
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RECEIVED: frozenset({RequestState.RESOLVING, *_ENDS}),
    RequestState.RESOLVING: frozenset({RequestState.DISPATCHED, *_ENDS}),
    RequestState.DISPATCHED: frozenset({RequestState.DISPATCHED, RequestState.STREAMING, *_ENDS}),
    RequestState.STREAMING: _ENDS,
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.ABORTED: frozenset(),
}


_ATTEMPT_MARK = "."


def attempt_id(request_id: RequestId, number: int) -> RequestId:
    """The `rid` of the `number`th attempt, from 1: an abort of one must not end the next."""
    return request_id if number == 1 else RequestId(f"{request_id}{_ATTEMPT_MARK}{number}")


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker that a request, or one of its images, was given to, and why."""

    stage: Stage
    worker_id: str
    reason: str


@dataclass(slots=True)
class RequestRecord:
    """A request as operators see it: state, counts and times, never its content."""

    request_id: RequestId
    created_unix_s: float
    created_s: float
    """On the monotonic clock, like every other `_s` time of a record."""
    state: RequestState = RequestState.RECEIVED
    request_class: RequestClass = RequestClass.INTERACTIVE
    tenant: str = ""
    """The name of the client's key, never the key."""
    limits: RequestConfig | None = None
    """The deadlines of its class, once it is admitted."""
    on_stage_done: Callable[[Stage, int], None] = lambda stage, num_images: None
    """Told when encode has done so many of its images, and when prefill has handed over."""
    waited_s: float | None = None
    """For its turn, once it had it."""
    status: int | None = None
    """HTTP status, once ended."""
    error_code: str | None = None
    model_id: str = ""
    num_images: int = 0
    num_image_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    encoded_s: float = 0.0
    """When an encode worker was last done with one of its images."""
    first_token_s: float | None = None
    is_answered: bool = False
    """The client has the whole answer; whatever happens afterwards, the request has finished."""
    ended_s: float | None = None
    placements: list[Placement] = field(default_factory=list[Placement])
    retries: list[str] = field(default_factory=list[str])
    """Why each attempt failed that was followed by another."""
    spans: list[tuple[str, Span]] = field(default_factory=list[tuple[str, Span]])
    """(worker_id, span); the coordinator's own spans carry the worker_id `coordinator`."""

    def enter(self, state: RequestState) -> None:
        """Move to `state`."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.request_id}: {self.state} → {state} is not allowed")
        self.state = state

    @property
    def ttft_s(self) -> float | None:
        """Time to first token.

        Measured at the coordinator for a stream; for a whole answer it is when the KV hand-off
        ended, which is when decode had its first token.
        """
        if self.first_token_s is not None:
            return self.first_token_s - self.created_s
        handoffs = [span for _, span in self.spans if span.name == "kv_handoff"]
        if not handoffs:
            return None
        return handoffs[-1].start_unix_s + handoffs[-1].duration_s - self.created_unix_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, as the decode worker measured it."""
        for _, span in self.spans:
            if span.name == "decode" and span.num_tokens > 1:
                return span.duration_s / (span.num_tokens - 1)
        return None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.created_s

    def to_dict(self) -> dict[str, Any]:
        """The record as `GET /admin/requests/{request_id}` answers it."""
        return {
            "request_id": self.request_id,
            "created_unix_s": self.created_unix_s,
            "outcome": self.state.value,
            "status": self.status,
            "error_code": self.error_code,
            "model_id": self.model_id,
            "request_class": self.request_class.value,
            "tenant": self.tenant,
            "waited_s": self.waited_s,
            "num_images": self.num_images,
            "num_image_tokens": self.num_image_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "placements": [asdict(placement) for placement in self.placements],
            "retries": list(self.retries),
            "spans": [
                {"worker_id": worker_id, **span.model_dump(exclude={"request_id"})}
                for worker_id, span in sorted(self.spans, key=lambda item: item[1].start_unix_s)
            ],
        }


class RequestLog:
    """Every running request, and the last `capacity` that ended, by id."""

    def __init__(self, clock: Clock, *, capacity: int = 1024) -> None:
        self._clock = clock
        self._capacity = capacity
        self._running: dict[RequestId, RequestRecord] = {}
        self._ended: OrderedDict[RequestId, RequestRecord] = OrderedDict()

    def open(self, request_id: RequestId) -> RequestRecord:
        """Start the record of a new request."""
        record = RequestRecord(request_id, self._clock.time(), self._clock.monotonic())
        self._running[request_id] = record
        return record

    def close(self, record: RequestRecord) -> None:
        """The request has ended: from now on newer ones that end may push its record out."""
        del self._running[record.request_id]
        self._ended[record.request_id] = record
        if len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of a request, by its id or that of one of its attempts."""
        key = RequestId(request_id.partition(_ATTEMPT_MARK)[0])
        return self._running.get(key) or self._ended.get(key)

    def add_spans(self, worker_id: str, spans: Iterable[Span]) -> None:
        """File spans under their requests; those of forgotten requests are dropped."""
        for span in spans:
            record = self.get(span.request_id)
            if record is None:
                continue
            record.spans.append((worker_id, span))
            if span.name == "prefill":
                record.num_prompt_tokens = record.num_prompt_tokens or span.num_tokens
            elif span.name == "decode":
                record.num_output_tokens = record.num_output_tokens or span.num_tokens
