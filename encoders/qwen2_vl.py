"""Qwen2-VL and Qwen2.5-VL: image tokens, M-RoPE positions and weight names.

The two families differ in their vision towers, not in anything the arithmetic here sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from encoders.base import ImageBudget, ImageGrid, RopePositions, WeightPart, canonical_size
from epd.errors import ConfigError

# Defaults of transformers 5.19, models/qwen2_vl/image_processing_pil_qwen2_vl.py, which apply
# where a checkpoint's preprocessor_config.json is silent.
DEFAULT_MIN_PIXELS = 56 * 56
DEFAULT_MAX_PIXELS = 28 * 28 * 1280

# Hub checkpoints name the vision tower `visual.`, transformers 5 saves `model.visual.`; the
# language model is `model.` or `model.language_model.`.
VISION_PREFIXES = ("model.visual.", "visual.")
LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


class Qwen2VLFamily:
    """See `encoders.base.ModelFamily`."""

    @property
    def model_types(self) -> frozenset[str]:
        return frozenset({"qwen2_vl", "qwen2_5_vl"})

    def image_budget(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]
    ) -> ImageBudget:
        vision: Mapping[str, Any] = config.get("vision_config") or {}
        # `size` is transformers 5's spelling; the older top-level keys win where both are given,
        # as they do in transformers.
        size: Mapping[str, Any] = preprocessor.get("size") or {}
        budget = ImageBudget(
            patch_size=_first(preprocessor.get("patch_size"), vision.get("patch_size"), 14),
            merge_size=_first(preprocessor.get("merge_size"), vision.get("spatial_merge_size"), 2),
            min_pixels=_first(
                preprocessor.get("min_pixels"),
                size.get("shortest_edge"),
                size.get("min_pixels"),
                DEFAULT_MIN_PIXELS,
            ),
            max_pixels=_first(
                preprocessor.get("max_pixels"),
                size.get("longest_edge"),
                size.get("max_pixels"),
                DEFAULT_MAX_PIXELS,
            ),
        )
        if budget.min_pixels > budget.max_pixels:
            raise ConfigError(
                f"preprocessor_config.json: min_pixels {budget.min_pixels} is larger than "
                f"max_pixels {budget.max_pixels}"
            )
        return budget

    def grid(self, width: int, height: int, budget: ImageBudget) -> ImageGrid:
        resized_width, resized_height = resized(*canonical_size(width, height), budget)
        return ImageGrid(1, resized_height // budget.patch_size, resized_width // budget.patch_size)

    def grid_tokens(self, grid: ImageGrid, budget: ImageBudget) -> int:
        return grid.num_patches // budget.merge_size**2

    def image_tokens(self, width: int, height: int, budget: ImageBudget) -> int:
        return self.grid_tokens(self.grid(width, height, budget), budget)

    def positions(
        self,
        token_ids: Sequence[int],
        image_token_id: int,
        grids: Sequence[ImageGrid],
        budget: ImageBudget,
    ) -> RopePositions:
        """M-RoPE: text advances all axes by one, an image spans a box of positions.

        Qwen2-VL paper, section 2.1; equal to `get_rope_index` of transformers 5.19. After an
        image, text goes on at the image's start + max(height, width), fewer than its tokens.
        """
        time: list[int] = []
        height: list[int] = []
        width: list[int] = []
        images = iter(grids)
        position = index = 0
        while index < len(token_ids):
            if token_ids[index] != image_token_id:
                time.append(position)
                height.append(position)
                width.append(position)
                position += 1
                index += 1
                continue
            grid = next(images, None)
            if grid is None:
                raise ValueError(f"more image tokens than the {len(grids)} images need")
            rows, columns = grid.h // budget.merge_size, grid.w // budget.merge_size
            stop = index + grid.t * rows * columns
            if any(token_id != image_token_id for token_id in token_ids[index:stop]):
                raise ValueError(f"text amid the tokens of an image at token {index}")
            for t in range(grid.t):
                for row in range(rows):
                    time += [position + t] * columns
                    height += [position + row] * columns
                    width += range(position, position + columns)
            position += max(rows, columns)
            index = stop
        if next(images, None) is not None or len(time) != len(token_ids):
            raise ValueError(f"fewer image tokens than the {len(grids)} images need")
        return RopePositions([time, height, width], position)

    def locate_weight(self, name: str) -> tuple[WeightPart, str]:
        for prefix in VISION_PREFIXES:
            if name.startswith(prefix):
                return WeightPart.VISION, name.removeprefix(prefix)
        if name.endswith("lm_head.weight"):
            return WeightPart.LANGUAGE, "lm_head.weight"
        for prefix in LANGUAGE_PREFIXES:
            if name.startswith(prefix):
                return WeightPart.LANGUAGE, name.removeprefix(prefix)
        return WeightPart.LANGUAGE, name


def resized(width: int, height: int, budget: ImageBudget) -> tuple[int, int]:
    """The (width, height) that the checkpoint's image processor resizes to.

    Both are multiples of patch_size * merge_size, the area is within the budget where possible,
    and the aspect ratio is kept as nearly as that allows. `smart_resize` of transformers 5.19,
    models/qwen2_vl/image_processing_pil_qwen2_vl.py; `round` is Python's, half to even.
    """
    unit = budget.patch_size * budget.merge_size
    new_width, new_height = round(width / unit) * unit, round(height / unit) * unit
    if new_width * new_height > budget.max_pixels:
        shrink = math.sqrt(width * height / budget.max_pixels)
        new_width = max(unit, math.floor(width / shrink / unit) * unit)
        new_height = max(unit, math.floor(height / shrink / unit) * unit)
    elif new_width * new_height < budget.min_pixels:
        grow = math.sqrt(budget.min_pixels / (width * height))
        new_width = math.ceil(width * grow / unit) * unit
        new_height = math.ceil(height * grow / unit) * unit
    return new_width, new_height


def _first(*candidates: Any) -> int:
    """The first value that is set; each must be a positive integer."""
    value = next(candidate for candidate in candidates if candidate is not None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"expected a positive integer in the checkpoint's config, got {value!r}")
    return value
