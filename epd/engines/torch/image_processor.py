"""Canonical pixels to patches, by the checkpoint's own image processor (resize, normalise, cut)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from encoders import ImageGrid
from encoders.pixels import canonical, canonical_image
from epd.engines.torch.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Patches:
    """One image, ready for the vision tower."""

    pixel_values: Tensor
    """`[grid.num_patches, patch_dim], fp32`, CPU"""
    grid: ImageGrid


class ImageProcessor:
    """Runs on the CPU; takes milliseconds per megapixel, so keep it off the event loop."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint(path)
        budget = checkpoint.image_budget
        # The budget is passed on as the arithmetic read it, so that the two cannot disagree.
        settings: dict[str, Any] = {
            key: value
            for key, value in checkpoint.preprocessor.items()
            if key not in ("image_processor_type", "processor_class", "min_pixels", "max_pixels")
        } | {
            "patch_size": budget.patch_size,
            "merge_size": budget.merge_size,
            "size": {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels},
        }
        self._processor = Qwen2VLImageProcessorPil(**settings)

    def patches(self, image: bytes | Image.Image) -> Patches:
        """Cut an image file, or an image that is decoded already, into patches.

        Raises:
            MediaError: the file is not an image, or broken.
        """
        pixels = canonical_image(image) if isinstance(image, bytes) else canonical(image)
        output = self._processor(images=[pixels], return_tensors="pt")
        t, h, w = output["image_grid_thw"][0].tolist()
        return Patches(output["pixel_values"].to(torch.float32), ImageGrid(t, h, w))
