"""The optimizer of the training makes the updates of PyTorch's own Muon."""

import pytest

torch = pytest.importorskip("torch")

from examples.tiny_vl.muon import Muon, orthogonalise  # noqa: E402

SHAPES = ((24, 40), (40, 24), (32, 32))


def _train(optimizer_of):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = optimizer_of(weights)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_its_steps_are_those_of_torch():
    settings = {"lr": 0.05, "weight_decay": 0.1}
    ours = _train(lambda weights: Muon(weights, **settings))
    theirs = _train(
        lambda weights: torch.optim.Muon(weights, adjust_lr_fn="match_rms_adamw", **settings)
    )
    for one, other in zip(ours, theirs, strict=True):
        # PyTorch rounds to bfloat16 on the way; four steps move a weight by about 0.2.
        assert (one - other).abs().max() < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_its_directions_are_nearly_orthonormal(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalise(matrix))
    assert singular.min() > 0.3
    assert singular.max() < 1.3
