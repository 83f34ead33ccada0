"""Affinity: an image goes where it is cached, or else where its content hash sends it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from epd.pools.routing.snapshot import Candidate, Choice, Snapshot


def affinity(snapshot: Snapshot, *, max_queue_ratio: float, free_queue_tokens: int) -> Choice:
    """The least cost; among equals the one whom rendezvous hashing of the content prefers.

        cost = tokens to encode (0 if cached) + queued tokens over the limit + link tokens
        limit = max(max_queue_ratio · mean queue once the image is placed, free_queue_tokens)

    Rendezvous hashing sends an image to the same worker while that one lives, and moves 1/n of the
    images when one of n workers comes or goes (Thaler and Ravishankar, 1998). The limit on a queue
    is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): a
    hot or slow worker has a long queue, and what is over the limit goes to the next in line.
    """
    candidates, num_tokens = snapshot.candidates, snapshot.work.num_tokens
    queued = sum(c.tokens_in_flight for c in candidates) + num_tokens
    limit = max(max_queue_ratio * queued / len(candidates), free_queue_tokens)

    costs: list[float] = []
    for c in candidates:
        to_encode = max(num_tokens - c.hit_tokens, 0)
        excess = max(c.tokens_in_flight + to_encode - limit, 0)
        costs.append(to_encode + excess + c.link_tokens)
    least = min(costs)
    cheapest = [c for c, cost in zip(candidates, costs, strict=True) if cost == least]
    if cached := [c for c in cheapest if c.hit_tokens]:
        # Take turns, so that a picture that everybody sends does not wear one worker out.
        best = min(cached, key=lambda c: (c.num_in_flight, c.last_turn, c.worker_id))
        return Choice(best, "cached")
    best = preferred(snapshot.work.key, cheapest)
    return Choice(best, f"content hash, of {len(cheapest)} that cost the same")


def preferred(key: str, candidates: Iterable[Candidate]) -> Candidate:
    """The one that `key` goes to by rendezvous hashing."""
    hasher = blake2b(key.encode(), digest_size=8)

    def rank(candidate: Candidate) -> tuple[bytes, str]:
        own = hasher.copy()
        own.update(candidate.worker_id.encode())
        return own.digest(), candidate.worker_id

    return max(candidates, key=rank)
