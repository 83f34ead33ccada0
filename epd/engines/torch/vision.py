"""The encode stage's computation: images to embeddings, in batches bounded by patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from encoders import ImageGrid
from epd.engines.torch.image_processor import ImageProcessor, Patches


@dataclass(frozen=True, slots=True)
class Embedding:
    """One encoded image."""

    values: Tensor
    """`[num_image_tokens, hidden_size]`, contiguous, the tower's dtype and device"""
    grid: ImageGrid


class VisionEncoder:
    """Runs the vision tower. `max_patches` bounds a batch's memory; one image may exceed it."""

    def __init__(
        self, tower: PreTrainedModel, processor: ImageProcessor, max_patches: int = 16_384
    ) -> None:
        self._tower: Any = tower
        self._processor = processor
        self._max_patches = max_patches

    def encode(self, images: Sequence[bytes | Image.Image]) -> list[Embedding]:
        """Embeddings of image files or decoded images, in order. Blocks while it computes.

        Raises:
            MediaError: a file is not an image, or broken.
        """
        patches = [self._processor.patches(image) for image in images]
        return [
            embedding
            for batch in batches(patches, self._max_patches)
            for embedding in self.run(batch)
        ]

    @torch.inference_mode()
    def run(self, batch: Sequence[Patches]) -> list[Embedding]:
        """One pass of the tower over the patches of `batch`; images do not attend to each other."""
        pixel_values = torch.cat([patches.pixel_values for patches in batch])
        grids = torch.tensor([[p.grid.t, p.grid.h, p.grid.w] for p in batch])
        output = self._tower(
            pixel_values.to(self._tower.device, self._tower.dtype),
            grid_thw=grids.to(self._tower.device),
        )
        merged = self._tower.spatial_merge_size**2
        rows = [patches.grid.num_patches // merged for patches in batch]
        values = output.pooler_output.split(rows)
        return [Embedding(v.contiguous(), p.grid) for v, p in zip(values, batch, strict=True)]


def batches(patches: Sequence[Patches], max_patches: int) -> Iterator[list[Patches]]:
    """Cut a row of images into runs of at most `max_patches`, or of one image that is larger."""
    batch: list[Patches] = []
    total = 0
    for image in patches:
        if batch and total + image.grid.num_patches > max_patches:
            yield batch
            batch, total = [], 0
        batch.append(image)
        total += image.grid.num_patches
    if batch:
        yield batch
