from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from epd.config import LinkConfig
from epd.pools.routing.links import HandOff, LinkCosts, Place, place_of, total_cost

COSTS = LinkCosts(same_node=0.0, same_rack=1.0, same_zone=10.0, elsewhere=100.0)


@pytest.mark.parametrize(
    ("one", "other", "cost"),
    [
        (Place("n", "r", "z"), Place("n", "r", "z"), 0.0),
        (Place("n", "r", "z"), Place("m", "r", "z"), 1.0),
        (Place("n", "r", "z"), Place("m", "s", "z"), 10.0),
        (Place("n", "r", "z"), Place("m", "s", "y"), 100.0),
        (Place("n", "r", "z"), Place("n", "s", "z"), 10.0),  # nodes of one name in two racks
        (Place("n", "r", "z"), Place("n", "r", "y"), 100.0),
        (Place("n", "", ""), Place("n", "r", "z"), 0.0),  # the host tells; labels are missing
        (Place("n", "r", ""), Place("m", "r", "z"), 1.0),
        (Place("n", "", "z"), Place("m", "r", "z"), 10.0),
        (Place("n", "", ""), Place("m", "", ""), 100.0),
        (Place(), Place(), 100.0),
    ],
)
def test_the_nearest_thing_in_common_counts(one: Place, other: Place, cost: float) -> None:
    assert COSTS.between(one, other) == COSTS.between(other, one) == cost


names = st.sampled_from(["", "a", "b"])
places = st.builds(Place, names, names, names)


@given(places, places)
def test_a_link_costs_the_same_both_ways(one: Place, other: Place) -> None:
    assert COSTS.between(one, other) == COSTS.between(other, one)


def test_a_hand_off_goes_to_the_nearest_place() -> None:
    near, far = Place("m", "r", "z"), Place("o", "q", "y")
    here = Place("n", "r", "z")
    for found, cost in (({near, far}, 7.0), ({far}, 700.0), (set[Place](), 0.0)):
        assert total_cost(here, [HandOff(7, frozenset(found))], COSTS.nearest) == cost
    both = [HandOff(7, frozenset({near})), HandOff(2, frozenset({far}))]
    assert total_cost(here, both, COSTS.nearest) == 207.0


def test_the_host_stands_for_a_node_without_a_label() -> None:
    assert place_of({}, "10.0.0.1") == Place("10.0.0.1")
    assert place_of({"node": "n", "zone": "z", "x": "y"}, "10.0.0.1") == Place("n", "", "z")


def test_costs_that_decrease_with_distance_are_refused() -> None:
    with pytest.raises(ValidationError, match="must not decrease"):
        LinkConfig(same_rack=0.6)
