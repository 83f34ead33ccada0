"""Synthetic requests, drawn by a seed. They come at one request per second on average.

`azure` has the marginals of the Azure LMM trace, and images that are asked about again; `mixed` has
pictures of all sizes, none of them twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

import encoders
from epd.engines.sim.profile import ModelShape
from epd.simulator.marginals import Marginals
from epd.simulator.requests import Image, SimRequest, build_request

MAX_NEW_TOKENS = 1024
"""The clients' `max_tokens`; longer answers of the trace, 1 to 3 %, are cut there."""

IMAGE_TOKEN_RATIO = 0.8
"""Assumed: the trace does not say how many of a request's tokens are its images'."""
MIN_TEXT_TOKENS = 16
_MIN_TOKENS_PER_IMAGE = 5
_MARK_TOKENS = 2
"""Around each image; see `epd.engines.sim.prompt`."""
_ROLE_TOKENS = 16
"""More than the roles take."""

# The trace's requests per minute: text 50 in the median and smooth; images 50 in the median and 200
# in the 99th percentile, from minute to minute. That is a lognormal factor of this sigma.
_REQUESTS_PER_MINUTE = 50
_BURST_SIGMA = math.log(200 / 50) / 2.326

SIZES = (
    *((64, 64), (224, 224), (336, 336), (512, 512), (768, 1024)),
    *((1024, 1024), (1920, 1080), (2048, 1536), (4032, 3024)),
)
"""(width, height) of `mixed`, each as likely as the others."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a question is about: some images, and how long the text is that comes with them."""

    images: tuple[Image, ...]
    num_text_tokens: int


class Popularity:
    """Chooses among what has been seen, the nth by a weight of 1 / n**exponent (Zipf)."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent
        self._cumulative: list[float] = []

    def add(self) -> None:
        """One more has been seen."""
        last = self._cumulative[-1] if self._cumulative else 0.0
        self._cumulative.append(last + (len(self._cumulative) + 1) ** -self._exponent)

    def draw(self, random: Random) -> int:
        """The number, from 0, of one that has been seen; the earlier, the likelier."""
        return bisect_left(self._cumulative, random.random() * self._cumulative[-1])


def azure(
    num_requests: int,
    seed: int,
    model: ModelShape,
    marginals: Marginals,
    *,
    reuse_ratio: float = 0.5,
    zipf_exponent: float = 1.0,
) -> list[SimRequest]:
    """Half text, half images; bursts of images; `reuse_ratio` of these seen before.

    A request that has more images has more tokens: both are drawn by one lot. What does not fit the
    model's context is drawn again. Text stands before or after the images, either half the time.

    Args:
        num_requests: how many.
        seed: decides everything.
        model: its context and how it cuts prompts.
        marginals: to draw from.
        reuse_ratio: share of requests with images that ask about those of an earlier one.
        zipf_exponent: how unequally popular images are.
    """
    random = Random(f"{seed} azure")
    seen: list[_Subject] = []
    popularity = Popularity(zipf_exponent)
    names = count()
    max_tokens = model.context_tokens - MAX_NEW_TOKENS - _ROLE_TOKENS

    def subject() -> _Subject:
        if seen and random.random() < reuse_ratio:
            return seen[popularity.draw(random)]
        found = _draw_subject(random, marginals, max_tokens, names, seed)
        seen.append(found)
        popularity.add()
        return found

    requests: list[SimRequest] = []
    for arrival_s, has_images in _bursty_arrivals(random, num_requests):
        if has_images:
            about = subject()
            outputs = marginals.output_tokens_image
        else:
            about = _Subject((), _draw_below(random, marginals.input_tokens_text.draw, max_tokens))
            outputs = marginals.output_tokens_text
        text = _text(f"{seed}.{len(requests)}", about.num_text_tokens, model)
        is_text_first = random.random() < 0.5
        content = [text, *about.images] if is_text_first else [*about.images, text]
        requests.append(
            build_request(
                f"azure-{len(requests)}",
                arrival_s,
                content,
                model,
                max_new_tokens=MAX_NEW_TOKENS,
                num_output_tokens=min(MAX_NEW_TOKENS, max(1, round(outputs.draw(random)))),
            )
        )
    return requests


def mixed(
    num_requests: int, seed: int, model: ModelShape, marginals: Marginals
) -> list[SimRequest]:
    """One to three pictures of any of `SIZES`, a short question, no picture twice; Poisson.

    Args:
        num_requests: how many.
        seed: decides everything.
        model: counts the pictures' tokens.
        marginals: for the lengths of answers.
    """
    random = Random(f"{seed} mixed")
    family, budget = encoders.family_of(model.model_type), model.image_budget
    names = count()
    requests: list[SimRequest] = []
    arrivals = _scaled([random.expovariate(1.0) for _ in range(num_requests)])
    for number, arrival_s in enumerate(arrivals):
        images = [
            Image(_hash(seed, next(names)), family.image_tokens(*random.choice(SIZES), budget))
            for _ in range(random.randint(1, 3))
        ]
        num_text_tokens = round(math.exp(random.uniform(math.log(MIN_TEXT_TOKENS), math.log(400))))
        outputs = marginals.output_tokens_image.draw(random)
        requests.append(
            build_request(
                f"mixed-{number}",
                arrival_s,
                [*images, _text(f"{seed}.{number}", num_text_tokens, model)],
                model,
                max_new_tokens=MAX_NEW_TOKENS,
                num_output_tokens=min(MAX_NEW_TOKENS, max(1, round(outputs))),
            )
        )
    return requests


WORKLOADS: Mapping[str, Callable[[int, int, ModelShape, Marginals], list[SimRequest]]] = {
    "azure": azure,
    "mixed": mixed,
}


def _draw_subject(
    random: Random, marginals: Marginals, max_tokens: int, names: Iterator[int], seed: int
) -> _Subject:
    while True:
        share = random.random()
        num_tokens = round(marginals.input_tokens_image.at(share))
        num_images = math.ceil(marginals.num_images.at(share))
        num_images = min(num_images, num_tokens // _MIN_TOKENS_PER_IMAGE)
        if num_tokens + _MARK_TOKENS * num_images <= max_tokens:
            break
    each = round(IMAGE_TOKEN_RATIO * num_tokens / num_images)
    images = tuple(Image(_hash(seed, next(names)), each) for _ in range(num_images))
    return _Subject(images, max(MIN_TEXT_TOKENS, num_tokens - num_images * each))


def _draw_below(random: Random, draw: Callable[[Random], float], limit: int) -> int:
    while (value := round(draw(random))) > limit:
        pass
    return value


def _bursty_arrivals(random: Random, num_requests: int) -> Iterator[tuple[float, bool]]:
    """(seconds, whether it has images), as many of either kind on average."""
    mean_factor = math.exp(_BURST_SIGMA**2 / 2)
    arrivals: list[tuple[float, bool]] = []
    for minute in count():
        if len(arrivals) >= num_requests:
            break
        factor = math.exp(random.gauss(0, _BURST_SIGMA)) / mean_factor
        for has_images, rate in (
            (True, _REQUESTS_PER_MINUTE * factor),
            (False, _REQUESTS_PER_MINUTE),
        ):
            within = random.expovariate(rate)
            while within < 1:
                arrivals.append((minute + within, has_images))
                within += random.expovariate(rate)
    arrivals = sorted(arrivals)[:num_requests]
    scale = num_requests / arrivals[-1][0]
    return ((at * scale, has_images) for at, has_images in arrivals)


def _scaled(gaps: list[float]) -> Iterator[float]:
    """Moments from gaps, so that the last of n is at n seconds."""
    scale = len(gaps) / sum(gaps)
    now_s = 0.0
    for gap in gaps:
        now_s += gap * scale
        yield now_s


def _text(start: str, num_tokens: int, model: ModelShape) -> str:
    """A text of so many tokens that no other begins like."""
    num_chars = num_tokens * model.chars_per_token
    return (f"{start} " * (num_chars // (len(start) + 1) + 1))[:num_chars]


def _hash(seed: int, number: int) -> str:
    return f"{seed:08x}{number:056x}"
