"""Prefix: a prompt goes where the least is left to compute before it is done."""

from __future__ import annotations

from epd.pools.routing.snapshot import Candidate, Choice, Snapshot


def prefix(snapshot: Snapshot, *, backlog_weight: float) -> Choice:
    """The least cost; ties go to whoever was chosen longest ago.

        cost = prompt tokens without the known prefix + backlog_weight · backlog + link tokens
        backlog = tokens in flight - those that must be computed by now

    So a known prefix of p tokens is worth a wait behind p / backlog_weight tokens more, and no
    longer one.
    """
    num_tokens = snapshot.work.num_tokens
    best = min(
        snapshot.candidates,
        key=lambda c: (
            num_tokens - c.hit_tokens + backlog_weight * _backlog(c) + c.link_tokens,
            c.last_turn,
            c.worker_id,
        ),
    )
    reason = f"prefix of {best.hit_tokens} of {num_tokens} tokens, {_backlog(best)} tokens ahead"
    return Choice(best, reason)


def _backlog(candidate: Candidate) -> int:
    return candidate.tokens_in_flight - candidate.done_tokens
