import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from encoders import ImageGrid
from epd.engines.torch.checkpoint import Checkpoint, load_vision
from epd.engines.torch.image_processor import ImageProcessor, Patches
from epd.engines.torch.vision import VisionEncoder, batches
from epd.errors import MediaError

SIZES = [(1, 1), (16, 16), (60, 40), (7, 90), (400, 300), (1, 5000), (3000, 2), (33, 65)]


def image_file(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def test_the_processor_agrees_with_the_arithmetic(checkpoint_path: Path):
    checkpoint = Checkpoint(checkpoint_path)
    processor = ImageProcessor(checkpoint_path)
    for width, height in SIZES:
        patches = processor.patches(image_file(width, height))
        assert patches.grid == checkpoint.family.grid(width, height, checkpoint.image_budget)
        assert patches.pixel_values.shape == (patches.grid.num_patches, 3 * 2 * 4 * 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": 1024, "max_pixels": 4096},
        {"size": {"min_pixels": 1024, "max_pixels": 4096}},
        {"min_pixels": 1024, "max_pixels": 4096, "size": {"shortest_edge": 1, "longest_edge": 2}},
    ],
)
def test_older_spellings_of_the_pixel_budget_bind_the_processor(
    checkpoint_path: Path, tmp_path: Path, settings: dict[str, Any]
):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint_path, copy)
    file = copy / "preprocessor_config.json"
    old = json.loads(file.read_text())
    del old["size"]
    file.write_text(json.dumps(old | settings))
    processor, checkpoint = ImageProcessor(copy), Checkpoint(copy)
    for width, height in SIZES:
        grid = processor.patches(image_file(width, height)).grid
        assert grid == checkpoint.family.grid(width, height, checkpoint.image_budget)
        if max(width, height) < 10 * min(width, height):
            assert 1024 <= grid.num_patches * 16 <= 4096


def test_embeddings_equal_those_of_transformers(engine: Any, reference: Any, all_cases: list[Any]):
    for case in all_cases:
        if not case.images:
            continue
        inputs = reference.processor(images=case.images, return_tensors="pt")
        with torch.no_grad():
            expected = reference.model.get_image_features(**inputs).pooler_output
        for embedding, values in zip(engine.vision.encode(case.images), expected, strict=True):
            assert embedding.values.is_contiguous()
            torch.testing.assert_close(embedding.values, values, rtol=1e-5, atol=1e-5)


def test_an_image_takes_the_rows_that_the_arithmetic_says(engine: Any):
    checkpoint = engine.checkpoint
    files = [image_file(width, height) for width, height in SIZES]
    for (width, height), embedding in zip(SIZES, engine.vision.encode(files), strict=True):
        tokens = checkpoint.family.image_tokens(width, height, checkpoint.image_budget)
        assert embedding.values.shape == (tokens, checkpoint.language.hidden_size)


def test_an_embedding_does_not_depend_on_its_batch(checkpoint_path: Path):
    tower, processor = load_vision(checkpoint_path, "cpu"), ImageProcessor(checkpoint_path)
    files = [image_file(width, height) for width, height in SIZES]
    together = VisionEncoder(tower, processor, max_patches=10**6).encode(files)
    alone = VisionEncoder(tower, processor, max_patches=1).encode(files)
    for left, right in zip(together, alone, strict=True):
        assert left.grid == right.grid
        torch.testing.assert_close(left.values, right.values, rtol=1e-5, atol=1e-5)


def test_batches_are_bounded_by_patches():
    def patches(count: int) -> Patches:
        return Patches(torch.empty(0), ImageGrid(1, 1, count))

    sizes = [[p.grid.w for p in batch] for batch in batches(list(map(patches, [3, 4, 9, 2, 5])), 7)]
    assert sizes == [[3, 4], [9], [2, 5]]
    assert list(batches([], 7)) == []


def test_no_images_give_no_embeddings(engine: Any):
    assert engine.vision.encode([]) == []


def test_a_broken_file_among_good_ones_is_a_media_error(engine: Any):
    with pytest.raises(MediaError):
        engine.vision.encode([image_file(9, 9), image_file(90, 90)[:80]])
