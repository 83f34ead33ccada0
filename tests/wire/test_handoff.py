from __future__ import annotations

from epd.wire import part_id, rid_of


def test_a_part_is_named_as_sglang_names_it_and_tells_its_request() -> None:
    assert part_id("chatcmpl-1", 12) == "chatcmpl-1_local_part_12"
    assert rid_of("chatcmpl-1_local_part_12") == "chatcmpl-1"


def test_a_request_may_be_named_like_a_part() -> None:
    assert rid_of(part_id("r_local_part_1", 2)) == "r_local_part_1"
