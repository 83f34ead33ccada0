"""Marginal distributions of a multimodal trace, to draw synthetic requests from.

The built-in table is a handful of quantiles of the Azure LMM inference trace of October 2024
(AzurePublicDataset, AzureLMMInferenceDataset2025, CC-BY; Qiu et al., ModServe, SoCC 2025). They
were read off the published plots, so within some two percentage points, and rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from epd.errors import ConfigError

FILE_NAME = "azure_lmm_2024_marginals.json"

Knots = Sequence[tuple[float, float]]
"""(value, share of draws that are no larger), both increasing; shares end at 1."""


class Distribution:
    """A cumulative distribution, log-linear between its knots.

    Raises:
        ValueError: there are no knots, they do not increase, or do not end at 1.
    """

    def __init__(self, knots: Knots) -> None:
        if not knots or knots[-1][1] != 1:
            raise ValueError("the last share must be 1")
        for (value, share), (next_value, next_share) in pairwise(knots):
            if not (0 < value <= next_value and 0 <= share <= next_share):
                raise ValueError(f"({next_value}, {next_share}) after ({value}, {share})")
        self._knots = tuple(knots)

    def at(self, share: float) -> float:
        """The value that this share of draws does not exceed."""
        lower = self._knots[0]
        for upper in self._knots:
            if share <= upper[1]:
                break
            lower = upper
        else:
            return self._knots[-1][0]
        if upper[1] == lower[1]:
            return upper[0]
        part = (share - lower[1]) / (upper[1] - lower[1])
        return math.exp(math.log(lower[0]) + part * math.log(upper[0] / lower[0]))

    def draw(self, random: Random) -> float:
        return self.at(random.random())


@dataclass(frozen=True, slots=True)
class Marginals:
    """What is known of the requests of a trace; tokens of a request with images include those."""

    source: str
    num_images: Distribution
    """Of a request that has any."""
    input_tokens_image: Distribution
    input_tokens_text: Distribution
    output_tokens_image: Distribution
    output_tokens_text: Distribution


_BUILT_IN: Mapping[str, Knots] = {
    "num_images_given_image": [(1, 0.66), (5, 0.75), (20, 0.9), (135, 0.95), (492, 0.99), (600, 1)],
    "input_tokens_image": [
        *[(250, 0.0), (295, 0.05), (420, 0.1), (860, 0.25), (1420, 0.5)],
        *[(4070, 0.75), (8760, 0.9), (21_700, 0.95), (36_500, 0.99), (150_000, 1.0)],
    ],
    "input_tokens_text": [
        *[(30, 0.0), (130, 0.05), (180, 0.1), (370, 0.25), (800, 0.5)],
        *[(1560, 0.75), (3160, 0.9), (4570, 0.95), (21_500, 0.99), (100_000, 1.0)],
    ],
    "output_tokens_image": [
        *[(1, 0.01), (7, 0.05), (13, 0.1), (35, 0.25), (79, 0.5)],
        *[(200, 0.75), (416, 0.9), (555, 0.95), (920, 0.99), (16_000, 1.0)],
    ],
    "output_tokens_text": [
        *[(1, 0.05), (4, 0.1), (26, 0.25), (151, 0.5)],
        *[(231, 0.75), (481, 0.9), (786, 0.95), (4000, 0.99), (16_000, 1.0)],
    ],
}


def built_in() -> Marginals:
    """The table of this module."""
    return _marginals("built-in quantiles of the Azure LMM trace", _BUILT_IN)


def load(folder: Path) -> Marginals:
    """Read `azure_lmm_2024_marginals.json`: finer knots of the same names, under `cdf`.

    Raises:
        ConfigError: the file is missing or is not of that form.
    """
    path = folder / FILE_NAME
    try:
        document: Any = json.loads(path.read_text())
        cdf: Mapping[str, Knots] = {
            name: [(float(value), float(share)) for value, share in document["cdf"][name]]
            for name in _BUILT_IN
        }
        return _marginals(FILE_NAME, cdf)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror})") from exc
    except KeyError as exc:
        raise ConfigError(f"{path}: {exc} is missing") from exc
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{path}: no cumulative distributions ({exc})") from exc


def _marginals(source: str, cdf: Mapping[str, Knots]) -> Marginals:
    return Marginals(
        source,
        Distribution(cdf["num_images_given_image"]),
        Distribution(cdf["input_tokens_image"]),
        Distribution(cdf["input_tokens_text"]),
        Distribution(cdf["output_tokens_image"]),
        Distribution(cdf["output_tokens_text"]),
    )
