"""The timeline of a request, as text."""

import io

import pytest
from rich.console import Console

from epd.demo.timeline import Timeline, bar
from epd.sdk import RequestTimeline, TimelineSpan

RECORD = RequestTimeline.model_validate(
    {
        "request_id": "r",
        "outcome": "finished",
        "created_unix_s": 100.0,
        "ttft_s": 0.080,
        "tpot_s": 0.005,
        "e2e_s": 0.100,
        "num_prompt_tokens": 40,
        "num_image_tokens": 16,
        "num_output_tokens": 5,
        "spans": [
            {"name": "fetch", "start_unix_s": 100.0, "duration_s": 0.001},
            {"name": "encode", "start_unix_s": 100.01, "duration_s": 0.03, "num_tokens": 16},
            {
                "name": "embedding_handoff",
                "start_unix_s": 100.04,
                "duration_s": 0.01,
                "nbytes": 16_384,
            },
            {"name": "prefill", "start_unix_s": 100.05, "duration_s": 0.02, "num_tokens": 40},
            {"name": "kv_handoff", "start_unix_s": 100.07, "duration_s": 0.01, "nbytes": 3 * 2**20},
            {"name": "decode", "start_unix_s": 100.08, "duration_s": 0.02, "num_tokens": 4},
        ],
    }
)


def render(record: RequestTimeline, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(Timeline(record))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def span(start_s: float, duration_s: float) -> TimelineSpan:
    return TimelineSpan(name="encode", start_unix_s=start_s, duration_s=duration_s)


def test_there_is_one_line_for_each_stage_in_the_order_of_the_request() -> None:
    lines = render(RECORD)
    labels = ["fetch", "encode", "embedding hand-off", "prefill", "KV hand-off", "decode"]
    assert [line[:19].strip() for line in lines[:6]] == labels
    assert lines[1].endswith("30.0 ms  16 tokens")
    assert lines[2].endswith("10.0 ms  16.0 KiB")
    assert lines[4].endswith("10.0 ms  3.0 MiB")
    assert lines[5].endswith("20.0 ms  4 tokens, 200 tokens/s")


def test_the_summary_names_the_latencies_and_the_sizes() -> None:
    assert render(RECORD)[6:] == [
        "TTFT 80.0 ms, TPOT 5.0 ms, E2E 100.0 ms",
        "prompt 40 tokens (16 of images), answer 5 tokens",
    ]


def test_bars_stand_where_the_stage_ran() -> None:
    assert bar([span(0, 5)], 0, 10, 10) == "█████·····"
    assert bar([span(5, 5)], 0, 10, 10) == "·····█████"
    assert bar([span(0, 2), span(8, 2)], 0, 10, 10) == "██······██"


def test_the_shortest_span_can_still_be_seen() -> None:
    assert bar([span(0, 0.001)], 0, 10, 10) == "█·········"
    assert bar([span(10, 0)], 0, 10, 10) == "·········█"


def test_a_request_without_any_time_is_drawn() -> None:
    assert bar([span(0, 0)], 0, 0, 10) == "█·········"


@pytest.mark.parametrize("width", [20, 60, 80, 120, 250])
def test_no_line_of_a_bar_is_wider_than_the_terminal(width: int) -> None:
    lines = render(RECORD, width)
    assert len(lines) >= 7
    assert all(len(line) <= width for line in lines)


def test_the_bars_use_the_width_they_are_given() -> None:
    num_cells = [sum(char in "█·" for char in render(RECORD, width)[0]) for width in (60, 80, 250)]
    assert num_cells == [10, 24, 60]


def test_a_text_request_shows_the_stages_it_skipped() -> None:
    kept = [s for s in RECORD.spans if s.name in ("prefill", "kv_handoff", "decode")]
    record = RECORD.model_copy(update={"spans": kept, "num_image_tokens": 0})
    lines = render(record)
    assert "█" not in lines[0] + lines[1] + lines[2]
    assert lines[1].rstrip().endswith("-")
    assert lines[7] == "prompt 40 tokens, answer 5 tokens"


def test_a_failed_request_without_figures_is_drawn() -> None:
    record = RequestTimeline(request_id="r", created_unix_s=1.0)
    assert len(render(record)) == 6


def test_a_clock_that_is_a_little_behind_does_not_move_a_bar_out_of_the_picture() -> None:
    early = RECORD.spans[0].model_copy(update={"start_unix_s": 99.9995})
    record = RECORD.model_copy(update={"spans": [early, *RECORD.spans[1:]]})
    assert "█" in render(record)[0]
