"""`epd status`: what it says of a worker."""

from __future__ import annotations

import pytest

from epd.cli.status import _state
from epd.sdk import WorkerStatus
from epd.types import Stage


@pytest.mark.parametrize(
    ("state", "is_left_alone", "shown"),
    [
        ("ready", False, "[green]ready[/]"),
        ("ready", True, "[red]ready, failing[/]"),
        ("draining", False, "[yellow]draining[/]"),
        ("lost", False, "[red]lost[/]"),
    ],
)
def test_a_state_is_shown_with_its_breaker(state: str, is_left_alone: bool, shown: str) -> None:
    worker = WorkerStatus(
        worker_id="w",
        stage=Stage.ENCODE,
        engine="sim",
        state=state,
        is_left_alone=is_left_alone,
        url="http://127.0.0.1:1",
        age_s=0.0,
        model_id="m",
    )
    assert _state(worker) == shown
