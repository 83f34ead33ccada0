"""Affinity: an image goes where it is cached, or else where its content hash sends it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from epd.pools.routing.snapshot import Candidate, Choice, Snapshot

_MASK = 2**64 - 1


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
        to_encode = num_tokens - c.hit_tokens
        excess = c.tokens_in_flight + to_encode - limit
        costs.append(to_encode + c.link_tokens + (excess if excess > 0 else 0))
    least = min(costs)
    cheapest = [c for c, cost in zip(candidates, costs, strict=True) if cost == least]
    if cached := [c for c in cheapest if c.hit_tokens]:
        # Take turns, so that a picture that everybody sends does not wear one worker out.
        best = min(cached, key=lambda c: (c.num_in_flight, c.last_turn, c.worker_id))
        return Choice(best, "cached")
    best = preferred(snapshot.work.key, cheapest)
    return Choice(best, f"content hash, of {len(cheapest)} that cost the same")


def preferred(key: str, candidates: Iterable[Candidate]) -> Candidate:
    """The one that `key` goes to by rendezvous hashing.

    Multiples of random numbers by a random factor, modulo 2⁶⁴, are ordered as randomly as a hash
    for each pair of key and worker would order them, and cost a tenth.
    """
    factor = _number(key) | 1
    return max(candidates, key=lambda c: _seed(c.worker_id) * factor & _MASK)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


_seed = lru_cache(maxsize=4096)(_number)  # a worker is a candidate again and again
