"""The plain policies that others are measured against; each serves any stage."""

from __future__ import annotations

from epd.pools.routing.snapshot import Choice, Snapshot


def least_loaded(snapshot: Snapshot) -> Choice:
    """The fewest tokens in flight, the hand-off's cost added; then the fewest requests.

    Ties go to whoever was chosen longest ago, so an idle pool is used evenly and not always from
    its first member (vllm#52484), and a worker that joins is not given all there is.
    """
    best = min(
        snapshot.candidates,
        key=lambda c: (
            c.tokens_in_flight + c.link_tokens,
            c.num_in_flight,
            c.last_turn,
            c.worker_id,
        ),
    )
    reason = f"least loaded: {best.tokens_in_flight} tokens in flight"
    return Choice(best, reason)


def round_robin(snapshot: Snapshot) -> Choice:
    """Whoever was chosen longest ago."""
    best = min(snapshot.candidates, key=lambda c: (c.last_turn, c.worker_id))
    return Choice(best, "its turn")


def random(snapshot: Snapshot) -> Choice:
    """Anyone, by lot."""
    in_order = sorted(snapshot.candidates, key=lambda c: c.worker_id)
    drawn = in_order[int(snapshot.lot * len(in_order))]
    return Choice(drawn, "by lot")
