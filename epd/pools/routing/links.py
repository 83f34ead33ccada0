"""What it costs to hand tokens over between two places, so that near workers can be preferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a worker runs; empty where nobody said."""

    node: str = ""
    rack: str = ""
    zone: str = ""


def place_of(labels: Mapping[str, str], host: str) -> Place:
    """A worker's place from its labels; the host of its URL stands for a node not named."""
    return Place(labels.get("node") or host, labels.get("rack", ""), labels.get("zone", ""))


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Tokens that could be computed while one is handed over, by the nearest thing in common."""

    same_node: float = 0.0
    same_rack: float = 0.0
    same_zone: float = 0.0
    elsewhere: float = 0.0

    def between(self, one: Place, other: Place) -> float:
        """The cost per token.

        Racks of one name in zones of two are two racks, and so for nodes: names count only as far
        as no wider one differs.
        """
        if _differ(one.zone, other.zone):
            return self.elsewhere
        if not _differ(one.rack, other.rack):
            if one.node and one.node == other.node:
                return self.same_node
            if one.rack and one.rack == other.rack:
                return self.same_rack
        return self.same_zone if one.zone and one.zone == other.zone else self.elsewhere

    def nearest(self, place: Place, places: frozenset[Place]) -> float:
        """The cost per token to the nearest of at least one place."""
        return min(self.between(place, other) for other in places)


Nearest = Callable[[Place, frozenset[Place]], float]
"""`LinkCosts.nearest`, or a memo of it."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """Tokens that go to or come from the nearest of some places."""

    num_tokens: int
    places: frozenset[Place]


def total_cost(place: Place, hand_offs: Sequence[HandOff], nearest: Nearest) -> float:
    """Of all hand-offs of a piece of work, in tokens, for a worker at `place`.

    One that has nobody at its other end costs nothing.
    """
    return sum(h.num_tokens * nearest(place, h.places) for h in hand_offs if h.places)


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)
