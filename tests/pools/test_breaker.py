"""When a worker that keeps failing is left alone, and when it is tried again."""

from __future__ import annotations

from epd.config import BreakerConfig
from epd.pools.breaker import Breaker

CONFIG = BreakerConfig(max_failures=3, open_s=5.0, max_open_s=15.0)


def opened() -> Breaker:
    """A breaker that opened at 0 s."""
    breaker = Breaker(CONFIG)
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(CONFIG)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.succeeded(0.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.is_closed
    breaker.failed(0.0)
    assert not breaker.is_closed
    assert not breaker.admits(0.0, is_idle=True)


def test_after_a_while_one_piece_of_work_at_a_time_tries_it() -> None:
    breaker = opened()
    assert not breaker.admits(4.9, is_idle=True)
    assert breaker.admits(5.0, is_idle=True)
    assert not breaker.admits(5.0, is_idle=False)


def test_a_success_on_trial_closes_it() -> None:
    breaker = opened()
    breaker.succeeded(6.0)
    assert breaker.is_closed
    assert breaker.admits(6.0, is_idle=False)
    assert [breaker.failed(6.0) for _ in range(3)] == [False, False, True]
    assert breaker.admits(11.0, is_idle=True), "the wait starts small again"


def test_a_failure_on_trial_doubles_the_wait_up_to_its_limit() -> None:
    breaker = opened()
    assert breaker.failed(5.0)
    assert not breaker.admits(14.9, is_idle=True)
    assert breaker.admits(15.0, is_idle=True)
    assert breaker.failed(15.0)
    assert breaker.admits(30.0, is_idle=True), "20 s would be over max_open_s"


def test_what_was_given_before_it_opened_neither_closes_it_nor_prolongs_the_wait() -> None:
    breaker = opened()
    breaker.succeeded(1.0)
    assert not breaker.is_closed
    assert not breaker.failed(4.0)
    assert breaker.admits(5.0, is_idle=True)
