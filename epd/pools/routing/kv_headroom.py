"""KV headroom: a decode goes where its KV has room, and where the batch it joins is lightest."""

from __future__ import annotations

from epd.pools.routing.snapshot import Candidate, Choice, Snapshot


def kv_headroom(snapshot: Snapshot, *, request_tokens: int) -> Choice:
    """The least share of its KV in use afterwards, among those that have room if there are any.

        share = (KV held + this prompt + growth + request_tokens · batch + link tokens) / capacity

    A decode step reads all KV of its batch, so its time grows with the KV and, less, with the
    number of requests; `request_tokens` says how many KV tokens one request is worth in that.
    Capacity stands for a worker's bandwidth too: more GPUs have more of both. KV held is the larger
    of what the worker reported and what was placed there, as reports are late and do not know of
    requests still in prefill.
    """
    need = snapshot.work.num_tokens + snapshot.work.growth_tokens
    # One that does not say its capacity is taken for like the others; if none says, tokens compare.
    usual = max(c.max_total_num_tokens for c in snapshot.candidates) or 1

    def weigh(c: Candidate) -> tuple[bool, float, int, str]:
        held = c.num_used_tokens if c.num_used_tokens > c.tokens_in_flight else c.tokens_in_flight
        batch = c.num_running if c.num_running > c.num_in_flight else c.num_in_flight
        is_full = 0 < c.max_total_num_tokens < held + need
        load = held + need + request_tokens * batch + c.link_tokens
        return is_full, load / (c.max_total_num_tokens or usual), c.last_turn, c.worker_id

    best = min(snapshot.candidates, key=weigh)
    capacity = f" of {best.max_total_num_tokens}" if best.max_total_num_tokens else ""
    note = "; all are full" if weigh(best)[0] else ""
    held = max(best.tokens_in_flight, best.num_used_tokens)
    return Choice(best, f"{held}{capacity} KV tokens held, {need} needed{note}")
