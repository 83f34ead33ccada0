"""`epd status`: what it says of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd.auth import load_token
from epd.cli import status as command
from epd.cli.status import _state, status
from epd.sdk import WorkerStatus
from epd.types import Stage


def worker(**changes: Any) -> WorkerStatus:
    fields: dict[str, Any] = {
        "worker_id": "w",
        "stage": Stage.ENCODE,
        "engine": "sim",
        "state": "ready",
        "url": "http://127.0.0.1:1",
        "age_s": 0.0,
        "model_id": "m",
    }
    return WorkerStatus(**{**fields, **changes})


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
    assert _state(worker(state=state, is_left_alone=is_left_alone)) == shown


def test_a_narrow_terminal_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = {"num_used_tokens": 123_456, "max_total_num_tokens": 262_144}
    shown = worker(worker_id="encode-of-the-first-rack-0", load=load)

    async def fetch(*_: object) -> list[WorkerStatus]:
        return [shown]

    monkeypatch.setattr(command, "_fetch", fetch)
    monkeypatch.setenv("COLUMNS", "80")
    token_file = tmp_path / "token"
    load_token(token_file, create=True)
    status(coordinator="http://127.0.0.1:1", token_file=token_file)
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[-6:] == ["running", "waiting", "tokens", "seen", "s", "ago"]
    assert {shown.worker_id, shown.url, "123456/262144"} <= set(row.split())
