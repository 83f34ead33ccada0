"""Preflight checks: what this machine lacks to run EPD, and what to do about it."""

from epd.doctor.check import Check, Verdict
from epd.doctor.diagnose import diagnose

__all__ = ["Check", "Verdict", "diagnose"]
