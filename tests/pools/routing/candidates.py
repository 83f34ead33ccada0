"""Candidates for the tests of policies: idle by default, named in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from epd.pools.routing.snapshot import Candidate, Snapshot, Work


def idle(num_workers: int, **fields: Any) -> list[Candidate]:
    return [Candidate(f"w{index:02}", **fields) for index in range(num_workers)]


def snapshot(candidates: Iterable[Candidate], num_tokens: int = 100, **fields: Any) -> Snapshot:
    lot = fields.pop("lot", 0.0)
    return Snapshot(Work(num_tokens, **fields), tuple(candidates), lot)


# Few values, so that ties are common.
_counts = st.integers(0, 3)
_tokens = st.sampled_from([0, 50, 100, 1000, 5000])
pools = st.lists(
    st.builds(
        Candidate,
        st.text("abc", min_size=1, max_size=3),
        num_in_flight=_counts,
        tokens_in_flight=_tokens,
        last_turn=_counts,
        hit_tokens=st.sampled_from([0, 0, 50, 100]),
        link_tokens=st.sampled_from([0.0, 3.0, 50.0]),
        num_running=_counts,
        num_used_tokens=_tokens,
        max_total_num_tokens=st.sampled_from([0, 1000, 10_000]),
        done_tokens=st.sampled_from([0, 0, 50]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.worker_id,
)
