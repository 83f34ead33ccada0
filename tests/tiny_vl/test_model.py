"""The fast forward pass of the training computes what transformers computes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.tiny_vl.model import (  # noqa: E402
    build_config,
    build_model,
    language_forward,
    vision_forward,
)
from examples.tiny_vl.tokenizer import SPECIAL_TOKENS  # noqa: E402

ROWS, COLUMNS, BATCH = 3, 5, 2


@pytest.fixture(scope="module")
def model():
    token_ids = {token: 300 + i for i, token in enumerate(SPECIAL_TOKENS)}
    built = build_model(build_config(320, token_ids), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        if parameter.ndim == 1:  # Norms and biases start at 1 and 0, which would hide mistakes.
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return built.eval()


@pytest.fixture(scope="module")
def pixels():
    shape = (BATCH, ROWS, COLUMNS, 4, 588)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _two_frames(pixels):
    """The layout of the image processor, [patches, 1176], every frame twice."""
    frames = pixels.view(-1, 3, 1, 196).expand(-1, -1, 2, -1)
    return frames.reshape(-1, 1176), torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]] * BATCH)


@torch.no_grad()
def test_the_image_tokens_equal_those_of_transformers(model, pixels):
    patches, grid = _two_frames(pixels)
    expected = model.model.visual(patches, grid_thw=grid).pooler_output
    given = vision_forward(model, pixels, is_compiled=False).flatten(0, 1)
    assert torch.allclose(given, expected, atol=1e-4)


@torch.no_grad()
def test_the_logits_equal_those_of_transformers(model, pixels):
    image = model.config.image_token_id
    start, end = model.config.vision_start_token_id, model.config.vision_end_token_id
    row = [5, 6, 7, start, *[image] * (ROWS * COLUMNS), end, 8, 9, 10]
    ids = torch.tensor([row] * BATCH)
    patches, grid = _two_frames(pixels)
    is_image = (ids == image).int()
    inputs = {"image_grid_thw": grid, "mm_token_type_ids": is_image}
    inputs["attention_mask"] = torch.ones_like(ids)
    expected = model(input_ids=ids, pixel_values=patches, **inputs).logits
    positions, _ = model.model.get_rope_index(ids, **inputs)
    embed = model.model.language_model.embed_tokens.weight
    x = torch.nn.functional.embedding(ids, embed)
    mask = torch.full((len(row), len(row)), -1e9).triu(1).expand(BATCH, 1, -1, -1)
    x[ids == image] = vision_forward(model, pixels, is_compiled=False).flatten(0, 1)
    given = language_forward(model, x, positions, mask, is_compiled=False) @ embed.T
    assert torch.allclose(given, expected, atol=1e-4)
