from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.pools.routing.kv_headroom import kv_headroom
from epd.pools.routing.snapshot import Candidate, Choice
from tests.pools.routing.candidates import pools, snapshot


def choose(candidates: list[Candidate], prompt: int = 100, growth: int = 0) -> Choice:
    found = snapshot(candidates, prompt, growth_tokens=growth)
    return kv_headroom(found, request_tokens=10)


def worker(name: str, held: int = 0, capacity: int = 1000, **fields: int) -> Candidate:
    return Candidate(name, tokens_in_flight=held, max_total_num_tokens=capacity)._replace(**fields)


def has_room(c: Candidate, need: int) -> bool:
    held = max(c.tokens_in_flight, c.num_used_tokens)
    return not c.max_total_num_tokens or held + need <= c.max_total_num_tokens


@settings(deadline=None, max_examples=200)
@given(pools, st.sampled_from([50, 500, 5000]), st.sampled_from([0, 500]))
def test_a_full_worker_is_never_chosen_while_one_has_room(
    found: list[Candidate], prompt: int, growth: int
) -> None:
    choice = choose(found, prompt, growth)
    rooms = [has_room(c, prompt + growth) for c in found]
    assert has_room(choice.candidate, prompt + growth) is any(rooms)
    assert ("full" in choice.reason) is not any(rooms)


def test_a_worker_is_full_at_its_last_token_and_not_before() -> None:
    # The large one is emptier by share, but has 199 tokens of room and not 200.
    for held, expected in ((800, "small"), (801, "large")):
        small = worker("small", held, 1000)
        large = worker("large", 9_000, 10_000, link_tokens=5000)
        assert choose([small, large], 150, growth=50).worker_id == expected


def test_growth_is_reserved() -> None:
    tight, roomy = worker("tight", 300), worker("roomy", 3600, 10_000, num_in_flight=8)
    assert choose([tight, roomy], 600).worker_id == "roomy"
    tight = worker("tight", 300, 2000)
    assert choose([tight, roomy], 100).worker_id == "tight"
    assert choose([tight, roomy], 100, growth=1601).worker_id == "roomy"


def test_the_share_in_use_is_compared_and_not_tokens() -> None:
    assert choose([worker("a", 500, 1000), worker("b", 900, 4000)]).worker_id == "b"


def test_a_smaller_batch_wins_at_equal_kv() -> None:
    pool = [worker("a", 500, num_in_flight=3), worker("b", 500, num_in_flight=2, last_turn=9)]
    assert choose(pool).worker_id == "b"


def test_a_request_in_the_batch_weighs_as_much_as_stated() -> None:
    crowded = worker("crowded", 500, num_in_flight=5)
    for held, expected in ((549, "other"), (551, "crowded")):
        assert choose([crowded, worker("other", held)]).worker_id == expected


def test_what_a_worker_reports_counts_where_it_is_more_than_we_placed() -> None:
    """Another coordinator's requests are there too."""
    reported = worker("reported", 100, num_used_tokens=600)
    assert choose([reported, worker("ours", 500)]).worker_id == "ours"
    assert choose([reported, worker("ours", 700)]).worker_id == "reported"
    batch = worker("batch", 100, num_running=9)
    assert choose([batch, worker("quiet", 150, num_in_flight=1)]).worker_id == "quiet"


def test_a_worker_without_a_stated_capacity_is_taken_for_like_the_others() -> None:
    pool = [worker("silent", 600, 0), worker("known", 500, 1000)]
    assert choose(pool).worker_id == "known"
    assert choose([pool[0], worker("known", 700, 1000)]).worker_id == "silent"
    assert choose([worker("a", 5, 0), worker("b", 4, 0)]).worker_id == "b"


def test_a_link_outweighs_as_much_kv_as_it_costs() -> None:
    far = worker("far", 0, link_tokens=50)
    for held, expected in ((49, "near"), (51, "far")):
        assert choose([worker("near", held), far]).worker_id == expected
