"""What a simulated client asks: a request of the wire contract, with its answer's length known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.coordinator.prompt_blocks import prompt_blocks
from epd.engines.sim.profile import ModelShape
from epd.engines.sim.prompt import SimPrompt, build_prompt
from epd.pools.routing import Block
from epd.wire import ChatRequest

MODEL_ID = "simulated"


@dataclass(frozen=True, slots=True)
class Image:
    """An image as far as serving it is concerned."""

    content_hash: str
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request."""

    request_id: str
    arrival_s: float
    images: tuple[Image, ...]
    image_tokens: dict[str, int]
    """By content hash."""
    prompt: SimPrompt
    """As the engines see it."""
    blocks: tuple[Block, ...]
    """The prompt as the coordinator sees it."""
    max_new_tokens: int
    """The client's limit on the answer."""
    num_output_tokens: int
    """How long the answer gets; nobody knows before."""


def build_request(
    request_id: str,
    arrival_s: float,
    content: Sequence[str | Image],
    model: ModelShape,
    *,
    max_new_tokens: int,
    num_output_tokens: int,
) -> SimRequest:
    """A request of one user message.

    Args:
        request_id: its name.
        arrival_s: when it comes.
        content: the message's texts and images, in order.
        model: cuts the prompt into tokens.
        max_new_tokens: the client's limit on the answer.
        num_output_tokens: how long the answer gets, at most `max_new_tokens`.
    """
    images = tuple(part for part in content if isinstance(part, Image))
    parts = [_part(part) for part in content]
    body = ChatRequest.model_validate(
        {"model": MODEL_ID, "messages": [{"role": "user", "content": parts}]}
    )
    hashes = [image.content_hash for image in images]
    tokens = {image.content_hash: image.num_tokens for image in images}
    return SimRequest(
        request_id,
        arrival_s,
        images,
        tokens,
        build_prompt(
            body,
            [image.num_tokens for image in images],
            chars_per_token=model.chars_per_token,
            block_tokens=model.block_tokens,
        ),
        tuple(prompt_blocks(body, hashes, tokens)),
        max_new_tokens,
        num_output_tokens,
    )


def _part(part: str | Image) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = {"url": f"https://images.example/{part.content_hash}", "content_hash": part.content_hash}
    return {"type": "image_url", "image_url": url}
