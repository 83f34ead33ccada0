"""Vision-language model families: one file each, and `family_of` to choose among them."""

from encoders.base import (
    ImageBudget,
    ImageGrid,
    ModelFamily,
    RopePositions,
    WeightPart,
    canonical_size,
)
from encoders.families import family_of

__all__ = [
    "ImageBudget",
    "ImageGrid",
    "ModelFamily",
    "RopePositions",
    "WeightPart",
    "canonical_size",
    "family_of",
]
