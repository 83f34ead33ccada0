"""The outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    ABSENT = "not present"
    """Optional, and not here: nothing to do unless it was expected."""
    WARNING = "warning"
    """Works on this machine alone; something to mend before more."""
    PROBLEM = "problem"
    """Stops even the demo on the CPU."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str
    what_to_do: str = ""
