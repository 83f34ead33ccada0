"""A worker's report to the coordinator, and the lease it gets in return."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from encoders import ImageBudget
from epd.addresses import parse_url
from epd.types import Stage, WorkerState


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ModelCard(_Message):
    """The model a worker serves."""

    model_id: str = Field(min_length=1)
    """The name clients use."""
    model_type: str
    """Hugging Face `model_type`; selects the family in `encoders/`."""
    context_tokens: int = Field(ge=1)
    image_budget: ImageBudget | None = None


class Load(_Message):
    """What a worker is doing now. Names follow SGLang's `/v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_tokens: int = 0
    """Image tokens (encode) or prompt tokens (prefill) not yet computed."""
    num_used_tokens: int = 0
    """Tokens held in the KV pool (prefill, decode) or the embedding arena (encode)."""
    max_total_num_tokens: int = 0
    num_completed_reqs: int = 0
    """Since start; progress that a watchdog can see."""


class Span(_Message):
    """One step of one request, as the worker that did it measured it."""

    request_id: str
    name: Literal["fetch", "encode", "embedding_handoff", "prefill", "kv_handoff", "decode"]
    start_unix_s: float
    duration_s: float
    nbytes: int = 0
    num_tokens: int = 0


class WorkerReport(_Message):
    """`PUT /internal/workers/{worker_id}`: registration and heartbeat are the same message.

    Each report is complete, so a restarted coordinator knows a worker again after one heartbeat.
    """

    version: Literal[1] = 1
    worker_id: str = Field(min_length=1, max_length=128)
    epoch: int
    """Nanoseconds since the Unix epoch at the worker's start; a higher epoch replaces a lower."""
    stage: Stage
    engine: str
    state: WorkerState
    url: Annotated[str, AfterValidator(parse_url)]
    bootstrap_port: int | None = None
    """Where decode asks a prefill worker for rooms, on the host of `url`."""
    pid: int | None = None
    encode_window: int = Field(default=8, ge=1)
    """Image parts that an encode worker works on at once; more would only queue there."""
    can_continue: bool = False
    """Prefill and decode: `return_token_ids` and `continue_from` of a chat request are known."""
    model: ModelCard
    labels: dict[str, str] = {}
    load: Load = Load()
    spans: list[Span] = []


class LeaseGrant(_Message):
    """The coordinator's answer to a report."""

    heartbeat_s: float
    lease_s: float
    encoder_paths: list[str]
    """Paths, on the coordinator, of the encoder slots a prefill worker sends images to."""


class AbortRequest(_Message):
    """`POST /abort_request`: stop working on `rid` and release what it holds. SGLang's shape."""

    rid: str = Field(min_length=1)
