"""The cluster token."""

from __future__ import annotations

import os
from pathlib import Path

from epd.auth import TOKEN_VARIABLE, default_token_file, load_token
from epd.doctor.check import Check, Verdict
from epd.errors import ConfigError


def check_token(token_file: Path | None = None) -> Check:
    """Whether coordinator and workers on this machine would find a sound token.

    `epd demo` makes one of its own, so nothing here stops it.
    """
    name = "cluster token"
    if token_file is None and os.environ.get(TOKEN_VARIABLE):
        place = TOKEN_VARIABLE
    else:
        try:
            path = token_file or default_token_file()
        except ConfigError as exc:
            return Check(name, Verdict.WARNING, exc.message, f"set HOME or {TOKEN_VARIABLE}")
        place = str(path)
        if not path.exists():
            detail = f"none yet; the coordinator makes {path}"
            return Check(name, Verdict.ABSENT, detail)
    try:
        load_token(token_file)
    except ConfigError as exc:
        return Check(name, Verdict.WARNING, exc.message, f"mend {place}")
    return Check(name, Verdict.OK, place)
