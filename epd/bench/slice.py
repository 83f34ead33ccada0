"""The three-stage path against plain transformers `generate`, in one run: ratios, not records.

Both sides answer the same questions about the same pictures with the same checkpoint, greedily, on
one thread a process. Rounds alternate, so that a slow minute of the machine hits both. The
checkpoint is a random one, made on the spot: time does not depend on what weights say, and its
answers always run to the limit, so that both sides make equally many tokens.

    python -m epd.bench.slice [--num-requests 8] [--num-rounds 5] [--max-tokens 64] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from epd.bench.report import Spread, machine, versions
from epd.bench.slice_reference import Question, Timing, TransformersReference, draw_questions
from epd.pools.local.temporary import temporary_deployment


@dataclass(frozen=True, slots=True)
class Round:
    """One side's figures of one round."""

    ttft_s: float
    """Mean over the round's requests, one at a time."""
    tokens_per_s: float
    """One request at a time."""


async def ask(session: aiohttp.ClientSession, url: str, question: Question) -> Timing:
    """One question through the served path, streamed."""
    body = {
        "model": "random-vl",
        "messages": question.messages,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    ttft_s, text, num_tokens = 0.0, "", 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            ttft_s = ttft_s or time.perf_counter() - began_s
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    return Timing(ttft_s, time.perf_counter() - began_s, num_tokens, text)


async def served_round(
    session: aiohttp.ClientSession, url: str, questions: Sequence[Question]
) -> tuple[Round, list[Timing]]:
    """Every question through the served path, one at a time."""
    timings = [await ask(session, url, question) for question in questions]
    return summarise(timings), timings


def summarise(timings: Sequence[Timing]) -> Round:
    return Round(
        ttft_s=sum(t.ttft_s for t in timings) / len(timings),
        tokens_per_s=sum(t.num_tokens for t in timings) / sum(t.e2e_s for t in timings),
    )


async def concurrent_rate(
    session: aiohttp.ClientSession, url: str, questions: Sequence[Question]
) -> float:
    """Tokens/s with all questions in flight at once."""
    began_s = time.perf_counter()
    timings = await asyncio.gather(*(ask(session, url, question) for question in questions))
    return sum(t.num_tokens for t in timings) / (time.perf_counter() - began_s)


async def measure(options: argparse.Namespace, folder: Path, progress: Console) -> dict[str, Any]:
    """Run all rounds; the figures as the last line shows them."""
    from epd.engines.torch.tiny import write_random_checkpoint

    model = folder / "random-vl"
    write_random_checkpoint(model, seed=options.seed)
    rounds: dict[str, list[Round]] = {"served": [], "transformers": []}
    together: list[float] = []
    num_equal = num_answers = 0
    async with (
        temporary_deployment(model, folder) as deployment,
        aiohttp.ClientSession() as session,
    ):
        reference = await asyncio.to_thread(TransformersReference, model)
        for number in range(-1, options.num_rounds):  # Round -1 warms both sides up.
            # New pictures each round: a repeated one would come from the encode worker's cache.
            questions = draw_questions(
                options.num_requests,
                seed=options.seed + 1000 * number,
                max_tokens=options.max_tokens,
            )
            served, answers = await served_round(session, deployment.url, questions)
            expected = [await asyncio.to_thread(reference.ask, q) for q in questions]
            fresh = draw_questions(
                options.num_requests,
                seed=options.seed + 1000 * number + 500,
                max_tokens=options.max_tokens,
            )
            rate = await concurrent_rate(session, deployment.url, fresh)
            if number < 0:
                continue
            plain = summarise(expected)
            rounds["served"].append(served)
            rounds["transformers"].append(plain)
            together.append(rate)
            num_answers += len(questions)
            num_equal += sum(a.text == e.text for a, e in zip(answers, expected, strict=True))
            progress.print(
                f"round {number + 1}/{options.num_rounds}: TTFT {served.ttft_s * 1e3:.0f} ms "
                f"served, {plain.ttft_s * 1e3:.0f} ms transformers"
            )
    return figures(rounds["served"], rounds["transformers"], together, num_equal, num_answers)


def figures(
    served: Sequence[Round],
    plain: Sequence[Round],
    together: Sequence[float],
    num_equal: int,
    num_answers: int,
) -> dict[str, Any]:
    """Ratios served / transformers within each round, then their spread over rounds."""
    pairs = list(zip(served, plain, strict=True))
    return {
        "ttft_ratio": Spread.of([s.ttft_s / p.ttft_s for s, p in pairs]).to_dict(),
        "tokens_per_s_ratio": Spread.of(
            [s.tokens_per_s / p.tokens_per_s for s, p in pairs]
        ).to_dict(),
        "concurrent_tokens_per_s_ratio": Spread.of(
            [rate / p.tokens_per_s for rate, p in zip(together, plain, strict=True)]
        ).to_dict(),
        "ttft_s": {
            "served": Spread.of([s.ttft_s for s in served]).to_dict(),
            "transformers": Spread.of([p.ttft_s for p in plain]).to_dict(),
        },
        "tokens_per_s": {
            "served": Spread.of([s.tokens_per_s for s in served]).to_dict(1),
            "served_concurrent": Spread.of(together).to_dict(1),
            "transformers": Spread.of([p.tokens_per_s for p in plain]).to_dict(1),
        },
        "num_equal_answers": num_equal,
        "num_answers": num_answers,
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Three-stage path against transformers generate (medians over rounds)")
    for column in ("", "served", "transformers", "ratio", "low", "high"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("TTFT, ms", "ttft_s", "served", "ttft_ratio", 1e3),
        ("tokens/s, one at a time", "tokens_per_s", "served", "tokens_per_s_ratio", 1.0),
        (
            "tokens/s, all at once",
            "tokens_per_s",
            "served_concurrent",
            "concurrent_tokens_per_s_ratio",
            1.0,
        ),
    ]
    for title, key, side, ratio, scale in rows:
        table.add_row(
            title,
            f"{result[key][side]['median'] * scale:.1f}",
            f"{result[key]['transformers']['median'] * scale:.1f}",
            *(f"{result[ratio][name]:.2f}" for name in ("median", "low", "high")),
        )
    console.print(table)
    console.print(f"equal answers: {result['num_equal_answers']} of {result['num_answers']}")


def main() -> None:
    """Run the benchmark; the last line printed is JSON."""
    parser = argparse.ArgumentParser(description="Served path against transformers generate.")
    parser.add_argument("--num-requests", type=int, default=8, help="questions a round")
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        result = asyncio.run(measure(options, Path(folder), Console(stderr=True)))
    show(result, console)
    result = {
        "benchmark": "slice",
        **result,
        "options": vars(options),
        "machine": machine(),
        "versions": versions(
            ["epd-serve", "torch", "transformers", "mooncake-transfer-engine-non-cuda", "aiohttp"]
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
