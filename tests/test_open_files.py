"""A process that serves may open as many files as its hard limit lets it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from epd.open_files import raise_open_files_limit


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_as_far_as_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_open_files_limit()
    soft, hard_after = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard_after == hard
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


def test_a_higher_limit_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files_limit()
    once = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == once
    assert once[0] == resource.RLIM_INFINITY or once[0] >= before[0]
