"""What the coordinator does when a worker fails: retries and circuit breakers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RetryConfig(_Section):
    """How often a request is tried again on other workers (see docs/failure.md)."""

    hang_s: float = Field(default=20.0, gt=0)
    """A prefill or decode worker that answers nobody for so long while a request waits for its
    first token counts as hung, and the request goes to others."""
    max_attempts: int = Field(default=3, ge=1)
    """Pairs of workers tried for a request."""
    max_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of the requests in flight that may be retries of what a living worker failed at."""
    min_at_once: int = Field(default=8, ge=0)
    """So many such retries at once are allowed whatever the share."""


class BreakerConfig(_Section):
    """When a worker that answers, but fails, is left alone for a while."""

    max_failures: int = Field(default=3, ge=1)
    """Requests that fail there in a row before it gets no more."""
    open_s: float = Field(default=5.0, gt=0)
    """How long it then gets none; twice as long each time that the next one fails too."""
    max_open_s: float = Field(default=60.0, gt=0)
    """At most so long."""

    @model_validator(mode="after")
    def _grows(self) -> BreakerConfig:
        if self.max_open_s < self.open_s:
            raise ValueError("max_open_s must not be below open_s")
        return self
