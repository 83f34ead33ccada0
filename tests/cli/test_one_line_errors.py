"""Which failures of a command become one line, and which keep their traceback."""

from __future__ import annotations

import errno

import pytest

from epd.cli.errors import one_line_errors
from epd.errors import ConfigError, DependencyError, WorkerError

IN_USE = OSError(errno.EADDRINUSE, "Address already in use")


@pytest.mark.parametrize(
    ("failures", "line", "code"),
    [
        ([WorkerError("gone"), ConfigError("x")], "epd: gone\n", 1),
        ([DependencyError("no torch")], "epd: no torch\n", 2),
        ([ExceptionGroup("", [ConfigError("bad\nkey")])], "epd: bad key\n", 2),
        ([ExceptionGroup("", [IN_USE]), WorkerError("gone")], "cannot listen", 2),
    ],
)
def test_foreseen_errors_of_a_task_group_end_in_one_line_about_the_first(
    failures: list[Exception], line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, one_line_errors():
        raise ExceptionGroup("", failures)
    assert left.value.code == code
    assert line in (told := capsys.readouterr().err)
    assert told.count("\n") == 1


def test_a_bug_among_them_keeps_its_traceback() -> None:
    bug = ExceptionGroup("", [WorkerError("gone"), ExceptionGroup("", [KeyError("bug")])])
    with pytest.raises(ExceptionGroup) as caught, one_line_errors():
        raise bug
    assert caught.value is bug
