"""What it costs to hand tokens over between two places, so that near workers can be preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class HandOff:
    """Tokens that go to or come from the nearest of some places."""

    num_tokens: int
    places: frozenset[Place]

    def cost(self, place: Place, costs: LinkCosts) -> float:
        """In tokens, for a worker at `place`; 0 if there is nobody at the other end."""
        if not self.num_tokens or not self.places:
            return 0.0
        return self.num_tokens * min(costs.between(place, other) for other in self.places)


def total_cost(place: Place, hand_offs: Sequence[HandOff], costs: LinkCosts) -> float:
    """Of all hand-offs of a piece of work, in tokens, for a worker at `place`."""
    return sum(hand_off.cost(place, costs) for hand_off in hand_offs)


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)
