"""The Muon optimizer in fp32, its work shared by the processes that train together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with the learning rates of AdamW (Liu et al., 2025).

    The same updates as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which orthogonalises
    in bfloat16: a CPU that has no such units emulates them at a small part of its speed. Each
    process orthogonalises its share of the matrices; the gradients must be equal in all of them.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(list(matrices), defaults)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; the gradient of every matrix must be there."""
        for group in self.param_groups:
            matrices: list[Tensor] = group["params"]
            updates = [self._average(matrix, group["momentum"]) for matrix in matrices]
            directions = _orthogonalise_together(updates)
            for matrix, direction in zip(matrices, directions, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)

    def _average(self, matrix: Tensor, momentum: float) -> Tensor:
        """The gradient averaged over steps, as Nesterov looks ahead of it."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        average: Tensor = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)


def _orthogonalise_together(updates: Sequence[Tensor]) -> Sequence[Tensor]:
    rank, num_processes = 0, 1
    if dist.is_initialized():
        rank, num_processes = dist.get_rank(), dist.get_world_size()
    parts = [
        orthogonalise(update) if index % num_processes == rank else torch.zeros_like(update)
        for index, update in enumerate(updates)
    ]
    if num_processes == 1:
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    shared = flat.split([part.numel() for part in parts])
    return [part.view_as(update) for part, update in zip(shared, updates, strict=True)]


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearly the closest matrix with orthonormal rows (or columns), by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x
