from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from epd.clock import FakeClock
from epd.coordinator.lifecycle import RequestLog, RequestRecord, RequestState
from epd.types import RequestId
from epd.wire import Span

ORDER = [
    RequestState.RECEIVED,
    RequestState.RESOLVING,
    RequestState.DISPATCHED,
    RequestState.STREAMING,
]
ENDS = [RequestState.FINISHED, RequestState.FAILED, RequestState.ABORTED]


def span(**fields: Any) -> Span:
    return Span(
        **{
            "request_id": "r",
            "name": "decode",
            "start_unix_s": 0,
            "duration_s": 1,
            **fields,
        }
    )


def record(state: RequestState = RequestState.RECEIVED) -> RequestRecord:
    return RequestRecord(RequestId("r"), created_unix_s=100, created_s=0, state=state)


@pytest.mark.parametrize(("now", "then"), list(product(RequestState, repeat=2)))
def test_only_the_drawn_transitions_are_allowed(now: RequestState, then: RequestState) -> None:
    is_next = now in ORDER[:-1] and then is ORDER[ORDER.index(now) + 1]
    is_retry = now is then is RequestState.DISPATCHED
    if is_next or is_retry or (now in ORDER and then in ENDS):
        subject = record(now)
        subject.enter(then)
        assert subject.state is then
    else:
        with pytest.raises(RuntimeError, match="not allowed"):
            record(now).enter(then)


def test_the_log_keeps_the_last_that_ended_in_the_order_of_their_ends() -> None:
    log = RequestLog(FakeClock(), capacity=2)
    opened = {name: log.open(RequestId(name)) for name in "abc"}
    for name in "bca":
        log.close(opened[name])
    assert log.get("b") is None
    assert log.get("c") is opened["c"]
    assert log.get("a") is opened["a"]


def test_a_running_request_outlasts_any_flood_of_others_and_still_gets_its_spans() -> None:
    log = RequestLog(FakeClock(), capacity=2)
    running = [log.open(RequestId(f"running-{index}")) for index in range(5)]
    for index in range(100):
        log.close(log.open(RequestId(f"other-{index}")))
    log.add_spans("d", [span(request_id="running-0", num_tokens=5)])
    assert [log.get(record.request_id) for record in running] == running
    assert running[0].num_output_tokens == 5


def test_spans_are_filed_under_their_request_and_others_dropped() -> None:
    log = RequestLog(FakeClock())
    opened = log.open(RequestId("r"))
    log.add_spans("p", [span(name="prefill", num_tokens=9), span(request_id="forgotten")])
    log.add_spans("d", [span(num_tokens=5, duration_s=2.0)])
    assert opened.num_prompt_tokens == 9
    assert opened.num_output_tokens == 5
    assert [worker_id for worker_id, _ in opened.spans] == ["p", "d"]
    assert opened.tpot_s == 0.5  # 2 s over the 4 tokens after the first


def test_one_token_has_no_time_per_output_token() -> None:
    subject = record()
    subject.spans.append(("d", span(num_tokens=1)))
    assert subject.tpot_s is None


def test_ttft_of_a_whole_answer_is_the_end_of_the_kv_handoff() -> None:
    subject = record()
    assert subject.ttft_s is None
    handoff = span(name="kv_handoff", start_unix_s=101.0, duration_s=0.5)
    subject.spans.append(("p", handoff))
    assert subject.ttft_s == 1.5
    subject.first_token_s = 3.0
    assert subject.ttft_s == 3.0


def test_a_record_tells_counts_and_times_in_order() -> None:
    subject = record()
    subject.spans.append(("d", span(start_unix_s=2)))
    subject.spans.append(("p", span(name="prefill", start_unix_s=1)))
    told = subject.to_dict()
    assert [s["name"] for s in told["spans"]] == ["prefill", "decode"]
    assert told["e2e_s"] is None
    subject.ended_s = 4.0
    assert subject.to_dict()["e2e_s"] == 4.0
