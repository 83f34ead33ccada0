"""Requests for tests of the simulator."""

from __future__ import annotations

from epd.engines.sim import Profile
from epd.simulator.requests import Image, SimRequest, build_request

PROFILE = Profile()


def image(number: int, num_tokens: int = 100) -> Image:
    return Image(f"{number:064x}", num_tokens)


def ask(
    number: int,
    *images: Image,
    arrival_s: float = 0.0,
    num_text_tokens: int = 100,
    num_output_tokens: int = 3,
) -> SimRequest:
    """Images, then a text that no other request has."""
    text = f"{number} ".ljust(num_text_tokens * PROFILE.model.chars_per_token, ".")
    return build_request(
        f"r{number}",
        arrival_s,
        [*images, text],
        PROFILE.model,
        max_new_tokens=64,
        num_output_tokens=num_output_tokens,
    )
