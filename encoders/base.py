"""What EPD must know about a family of vision-language models, without loading any of them.

The coordinator counts image tokens from a width and a height; workers expand placeholders, compute
positions and pick their weights. All of it is arithmetic on small numbers and names, so nothing
here (or in a family's file) imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

MAX_ASPECT_RATIO = 200
"""Qwen's resize refuses narrower images (transformers 5.19, qwen2_vl image processor)."""


def canonical_size(width: int, height: int) -> tuple[int, int]:
    """The (width, height) at which a model sees an image of this size, before its own resize.

    An image narrower than 1:200 has its short side stretched to ceil(long / 200), so that it is
    answered instead of refused. `encoders.pixels` makes images of this size.
    """
    shortest = -(-max(width, height) // MAX_ASPECT_RATIO)
    return max(width, shortest), max(height, shortest)


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image in patches, before the vision tower merges them."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class ImageBudget:
    """How a checkpoint cuts images: lengths in pixels, except `merge_size`, in patches."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Positions of a prompt's tokens on the axes (time, height, width): `axes[3][num_tokens]`."""

    axes: list[list[int]]
    next_position: int
    """Position, on all axes, of the token after the prompt."""


class WeightPart(StrEnum):
    """The stage a weight belongs to: encode, or prefill and decode."""

    VISION = "vision"
    LANGUAGE = "language"


class ModelFamily(Protocol):
    """One family's arithmetic. Implementations are stateless."""

    @property
    def model_types(self) -> frozenset[str]:
        """The `model_type`s, as config.json spells them, that this family serves."""
        ...

    def image_budget(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]
    ) -> ImageBudget:
        """Read a checkpoint's config.json and preprocessor_config.json.

        Raises:
            ConfigError: a value is missing or makes no sense.
        """
        ...

    def grid(self, width: int, height: int, budget: ImageBudget) -> ImageGrid:
        """The patches of an image of `width` x `height` pixels (each at least 1)."""
        ...

    def grid_tokens(self, grid: ImageGrid, budget: ImageBudget) -> int:
        """The image tokens that `grid` becomes in the prompt."""
        ...

    def image_tokens(self, width: int, height: int, budget: ImageBudget) -> int:
        """The image tokens of an image of `width` x `height` pixels."""
        ...

    def positions(
        self,
        token_ids: Sequence[int],
        image_token_id: int,
        grids: Sequence[ImageGrid],
        budget: ImageBudget,
    ) -> RopePositions:
        """Positions of a prompt in which each image's placeholder is already repeated.

        `grids` are the prompt's images in order. Two images may touch.

        Raises:
            ValueError: the placeholders and `grids` do not agree.
        """
        ...

    def locate_weight(self, name: str) -> tuple[WeightPart, str]:
        """The part that a safetensors name belongs to, and its name inside that part.

        Language names are those of a plain causal model (`embed_tokens.weight`, `layers.0…`,
        `norm.weight`, `lm_head.weight`), vision names those of the vision tower.
        """
        ...
