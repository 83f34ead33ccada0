import random

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from encoders import ImageBudget, ImageGrid, WeightPart, canonical_size, family_of
from encoders.qwen2_vl import resized
from epd.errors import ConfigError

BUDGET = ImageBudget(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=1003520)
FAMILY = family_of("qwen2_5_vl")


def test_both_qwen_generations_share_one_family():
    assert family_of("qwen2_vl") is FAMILY


def test_an_unknown_model_type_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'llava'.*qwen2_5_vl, qwen2_vl"):
        family_of("llava")


def test_resized_sizes_equal_those_of_transformers():
    chance = random.Random(0)
    sizes = [(1, 1), (1, 200), (14, 14), (42, 42), (70, 70), (28, 5600), (4000, 3000)]
    sizes += [(chance.randint(1, 3000), chance.randint(1, 3000)) for _ in range(2000)]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        expected = smart_resize(height, width, 28, BUDGET.min_pixels, BUDGET.max_pixels)
        assert resized(width, height, BUDGET) == expected[::-1], (width, height)


def test_image_tokens_count_merged_patches():
    assert FAMILY.grid(448, 224, BUDGET) == ImageGrid(1, 16, 32)
    assert FAMILY.image_tokens(448, 224, BUDGET) == 16 * 32 // 4


def test_a_sliver_is_counted_at_the_width_it_is_stretched_to():
    assert canonical_size(1, 5000) == (25, 5000)
    assert canonical_size(5001, 1) == (5001, 26)
    assert FAMILY.image_tokens(1, 5000, BUDGET) == FAMILY.image_tokens(25, 5000, BUDGET) > 0


@pytest.mark.parametrize(
    "preprocessor",
    [
        {"min_pixels": 784, "max_pixels": 50176},
        {"size": {"shortest_edge": 784, "longest_edge": 50176}},
        {"size": {"min_pixels": 784, "max_pixels": 50176}},
        {
            "min_pixels": 784,
            "max_pixels": 50176,
            "size": {"shortest_edge": 1, "longest_edge": 2},
        },
    ],
)
def test_the_pixel_budget_is_read_in_every_spelling(preprocessor: dict[str, object]):
    budget = FAMILY.image_budget({"vision_config": {"spatial_merge_size": 2}}, preprocessor)
    assert budget == ImageBudget(14, 2, 784, 50176)


@pytest.mark.parametrize(
    "preprocessor", [{"min_pixels": 9, "max_pixels": 4}, {"patch_size": "14"}, {"merge_size": 0}]
)
def test_a_budget_that_makes_no_sense_is_refused(preprocessor: dict[str, object]):
    with pytest.raises(ConfigError):
        FAMILY.image_budget({}, preprocessor)


def test_positions_of_adjacent_images_follow_each_other():
    pad = 9
    grids = [ImageGrid(1, 4, 6), ImageGrid(1, 4, 4)]
    positions = FAMILY.positions([1, *[pad] * 6, *[pad] * 4, 2], pad, grids, BUDGET)
    assert positions.axes == [
        [0, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 4, 5, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 4, 5, 6],
    ]
    assert positions.next_position == 7


@pytest.mark.parametrize(
    ("token_ids", "num_images"), [([9, 9, 9, 9], 0), ([9, 9, 9, 9], 2), ([9, 9], 1), ([9, 1, 9], 1)]
)
def test_placeholders_that_do_not_fit_the_images_are_refused(token_ids: list[int], num_images: int):
    with pytest.raises(ValueError, match="image"):
        FAMILY.positions(token_ids, 9, [ImageGrid(1, 4, 4)] * num_images, BUDGET)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("visual.merger.ln_q.weight", (WeightPart.VISION, "merger.ln_q.weight")),
        ("model.visual.merger.ln_q.weight", (WeightPart.VISION, "merger.ln_q.weight")),
        ("model.norm.weight", (WeightPart.LANGUAGE, "norm.weight")),
        ("model.language_model.norm.weight", (WeightPart.LANGUAGE, "norm.weight")),
        ("lm_head.weight", (WeightPart.LANGUAGE, "lm_head.weight")),
    ],
)
def test_weights_are_found_under_hub_and_transformers_names(
    name: str, expected: tuple[WeightPart, str]
):
    assert FAMILY.locate_weight(name) == expected
