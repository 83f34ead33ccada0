"""Where a request's time went, one bar for each stage; fits the width it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from epd.sdk import RequestTimeline, TimelineSpan

_ROWS = (
    ("fetch", "fetch", "yellow"),
    ("encode", "encode", "magenta"),
    ("embedding_handoff", "embedding hand-off", "bright_magenta"),
    ("prefill", "prefill", "cyan"),
    ("kv_handoff", "KV hand-off", "bright_cyan"),
    ("decode", "decode", "green"),
)
"""Span name, label, colour; in the order in which a request passes them."""
_LABEL_WIDTH = max(len(label) for _, label, _ in _ROWS)
_TIME_WIDTH = 10
_NOTE_WIDTH = 24
_MIN_BAR_WIDTH = 10
_MAX_BAR_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Timeline:
    """A rich renderable of `record`."""

    record: RequestTimeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _LABEL_WIDTH - _TIME_WIDTH - _NOTE_WIDTH - 4
        width = max(_MIN_BAR_WIDTH, min(_MAX_BAR_WIDTH, room))
        start_s = self._start_s()
        total_s = max([self.record.e2e_s or 0.0, *(_end_s(s) - start_s for s in self.record.spans)])
        for name, label, style in _ROWS:
            spans = [span for span in self.record.spans if span.name == name]
            line = Text(f"{label:<{_LABEL_WIDTH}} ", no_wrap=True, overflow="crop")
            line.append(bar(spans, start_s, total_s, width), style)
            took = _milliseconds(sum(span.duration_s for span in spans)) if spans else "-"
            line.append(f" {took:>{_TIME_WIDTH}}  {_note(name, spans)}")
            yield line
        for summary in (_latencies(self.record), _sizes(self.record)):
            if summary:
                yield Text(summary)

    def _start_s(self) -> float:
        # The clocks of two processes differ by microseconds: no bar may begin before zero.
        starts = [span.start_unix_s for span in self.record.spans]
        return min([self.record.created_unix_s, *starts])


def bar(spans: Sequence[TimelineSpan], start_s: float, total_s: float, width: int) -> str:
    """`width` characters, full where a span was running; each span fills at least one."""
    cells = ["·"] * width
    scale = width / total_s if total_s > 0 else 0.0
    for span in spans:
        first = min(width - 1, max(0, int((span.start_unix_s - start_s) * scale)))
        last = min(width - 1, max(first, round((_end_s(span) - start_s) * scale) - 1))
        cells[first : last + 1] = "█" * (last + 1 - first)
    return "".join(cells)


def _end_s(span: TimelineSpan) -> float:
    return span.start_unix_s + span.duration_s


def _note(name: str, spans: Sequence[TimelineSpan]) -> str:
    nbytes = sum(span.nbytes for span in spans)
    num_tokens = sum(span.num_tokens for span in spans)
    if name == "decode" and num_tokens:
        rate = num_tokens / max(1e-9, sum(span.duration_s for span in spans))
        return f"{num_tokens} tokens, {rate:.0f} tokens/s"
    if name in ("encode", "prefill") and num_tokens:
        return f"{num_tokens} tokens"
    return _bytes(nbytes) if nbytes else ""


def _latencies(record: RequestTimeline) -> str:
    values = (("TTFT", record.ttft_s), ("TPOT", record.tpot_s), ("E2E", record.e2e_s))
    return ", ".join(f"{name} {_milliseconds(s)}" for name, s in values if s is not None)


def _sizes(record: RequestTimeline) -> str:
    parts: list[str] = []
    if record.num_prompt_tokens:
        images = f" ({record.num_image_tokens} of images)" if record.num_image_tokens else ""
        parts.append(f"prompt {record.num_prompt_tokens} tokens{images}")
    if record.num_output_tokens:
        parts.append(f"answer {record.num_output_tokens} tokens")
    return ", ".join(parts)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _bytes(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} B"
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB"
