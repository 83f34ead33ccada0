"""Who waits, who goes first, and who is refused: the classes of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ClassConfig(_Section):
    """What holds for the requests of one class; docs/admission.md has the rules."""

    max_queue: int = Field(default=1024, ge=1)
    """Requests of the class that are read or wait for their turn at once; more are refused."""
    first_token_s: Seconds | None = None
    """Deadline of the first token, waiting included; `requests.first_token_s` if not given."""
    total_s: Seconds | None = None
    """Deadline of the whole answer; `requests.total_s` if not given."""
    ttft_target_s: Seconds | None = None
    """Refuse at once what would wait longer for its first token; its deadline if not given."""
    max_backlog_s: Seconds = 2.0
    """Work that a stage is given before more waits here, in seconds of its measured speed."""
    max_kv_ratio: float | None = Field(default=None, gt=0)
    """Share of the decode pool's KV spoken for above which more waits here; none if not given."""


class InteractiveConfig(ClassConfig):
    """What people wait for."""


class BatchConfig(ClassConfig):
    """What nobody waits for: given to workers that would otherwise be idle."""

    max_queue: int = Field(default=64, ge=1)
    """Requests of the class that are read or wait; each holds its images in the media cache."""
    first_token_s: Seconds | None = 3600.0
    """Deadline of the first token, waiting included; `requests.first_token_s` if null."""
    total_s: Seconds | None = 7200.0
    """Deadline of the whole answer; `requests.total_s` if null."""
    max_backlog_s: Seconds = 0.5
    """Most that batch adds to the queue of a stage, in seconds of its measured speed."""
    max_kv_ratio: float | None = Field(default=0.5, gt=0)
    """Share of the decode pool's KV spoken for above which batch waits; null for no limit."""


class AdmissionConfig(_Section):
    """Classes: a request is interactive unless its header `X-EPD-Class` or API key says batch."""

    interactive: InteractiveConfig = InteractiveConfig()
    batch: BatchConfig = BatchConfig()
