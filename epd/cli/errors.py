"""The edge of the command line: any foreseen error becomes one line on standard error."""

from __future__ import annotations

import errno
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from epd.errors import ConfigError, DependencyError, EPDError, leaves

EXIT_FAILED = 1
EXIT_USAGE = 2
"""The command, its options, its configuration or the installation: trying again cannot help."""
_EXIT_INTERRUPTED = 130


@contextmanager
def one_line_errors() -> Generator[None]:
    """Leave the process with a clear line for the errors a user can meet.

    What is not foreseen is our bug and keeps its traceback.
    """
    try:
        yield
    except typer.TyperException as exc:
        # `epd` alone prints its help and then ends in an error without words.
        if not exc.format_message():
            sys.exit(exc.exit_code)
        fail(f"{exc.format_message()} (see --help)", exc.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_EXIT_INTERRUPTED)
    except BaseExceptionGroup as group:
        errors = [_foreseen(leaf) for leaf in leaves(group)]
        if (first := errors[0]) is None or None in errors:
            raise
        _fail_with(first)
    except (EPDError, OSError) as exc:
        if (first := _foreseen(exc)) is None:
            raise
        _fail_with(first)


def fail(message: str, exit_code: int) -> NoReturn:
    """Print one line to standard error and leave."""
    print(f"epd: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(exit_code)


def _fail_with(error: EPDError) -> NoReturn:
    is_final = isinstance(error, (ConfigError, DependencyError))
    fail(error.message, EXIT_USAGE if is_final else EXIT_FAILED)


def _foreseen(exc: BaseException) -> EPDError | None:
    if isinstance(exc, EPDError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return ConfigError(f"cannot listen: {exc.strerror}; give another --host or --port")
    return None
