"""What a run says of its scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from epd.simulator.run import Run, Served


@dataclass(frozen=True, slots=True)
class Targets:
    """What a client is promised."""

    ttft_s: float
    tpot_s: float

    def are_met(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    in_order = sorted(values)
    return in_order[max(0, math.ceil(share * len(in_order)) - 1)]


def imbalance(values: Sequence[float]) -> float:
    """The largest over the mean: 1 if all are equal, their number if one has it all."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    attainment: float
    """Share of requests that met both targets."""
    goodput_per_s: float
    """Such requests, by the time in which all arrived."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    encodes_per_image: float
    """Runs of a vision tower by distinct images: 1 is the least."""
    encode_imbalance: float
    """Of the time in which workers computed, see `imbalance`."""
    prefill_imbalance: float
    prefix_hit_ratio: float
    """Share of prompt tokens that prefill did not compute."""

    @classmethod
    def of(cls, run: Run, targets: Targets) -> Figures:
        """The figures of a run of at least one request."""
        num_met = sum(targets.are_met(served) for served in run.served)
        ttfts = [served.ttft_s for served in run.served]
        images = {image for served in run.served for image in served.request.images}
        return cls(
            attainment=num_met / len(run.served),
            goodput_per_s=num_met / run.span_s,
            ttft_p50_s=quantile(ttfts, 0.5),
            ttft_p99_s=quantile(ttfts, 0.99),
            tpot_p99_s=quantile([served.tpot_s for served in run.served], 0.99),
            encodes_per_image=run.num_encodes / len(images) if images else 0.0,
            encode_imbalance=imbalance(run.encode_busy_s),
            prefill_imbalance=imbalance(run.prefill_busy_s),
            prefix_hit_ratio=run.num_cached_prompt_tokens / run.num_prompt_tokens,
        )


def rate_at(attainment: float, rates: Sequence[float], attained: Sequence[float]) -> float:
    """The arrival rate up to which at least `attainment` of the requests met their targets.

    Args:
        attainment: the share asked for.
        rates: increasing.
        attained: the share at each rate; between rates it is taken to be linear.

    Returns:
        The last rate if the share is attained at all of them, 0 if not even at the first.
    """
    if attained[0] < attainment:
        return 0.0
    for index in range(1, len(rates)):
        before, after = attained[index - 1], attained[index]
        if after < attainment:
            part = (before - attainment) / (before - after)
            return rates[index - 1] + part * (rates[index] - rates[index - 1])
    return rates[-1]
