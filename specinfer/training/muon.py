"""Muon in the weights' own precision, for processors without bfloat16.

Knows: gradients.  Does not know: models, schedules.

`torch.optim.Muon` orthogonalises in bfloat16.  A processor without bfloat16 products takes ten times as long over the
steps, longer than over the forward and backward passes of a head.  Here the same steps are made in float32.
"""

from math import sqrt

import torch
from torch import Tensor

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of the quintic iteration (Jordan 2024)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, whose state and settings it takes."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Make one step; there is no closure."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                    momentum.lerp_(weight.grad, 1 - group["momentum"])
                    update = orthogonalised(weight.grad.lerp(momentum, group["momentum"]))
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-0.2 * sqrt(max(weight.shape)) * group["lr"])


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix (M, N) with its singular values brought near 1, between 0.5 and 1.5 (Newton-Schulz, quintic)."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
