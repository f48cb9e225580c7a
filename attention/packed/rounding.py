"""Weights rounded to integers of 8 or 4 bits with a float16 scale for 32 inputs each, as packed matrices hold them.

Knows: which numbers weights become.  Does not know: the packed layout, models, files.

    8 bits    integers from -128 to 127; the number of largest magnitude becomes 127 or -127
    4 bits    integers from -8 to 7; the number of largest magnitude becomes -8, or a little less than it is if the
              squared error of its group is smaller so
"""

import torch
from torch import Tensor

from specinfer.attention.packed.formats import Quantised
from specinfer.attention.packed.layout import GROUP
from specinfer.errors import ModelError

TRIED = {8: (-128 / 127,), 4: (1.0, 0.92)}  # by bits: scales, by the one that makes the largest the lowest


def rounded(weight: Tensor, bits: int) -> Quantised:
    """Return a weight (N, K), K a multiple of 32, rounded to integers of 8 or 4 bits.

    Raises:
        ModelError: a number is none, or is too large for a scale of 16 bits.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    lowest = 1 << (bits - 1)
    exact = torch.where(-low > high, low, high) / -lowest
    least, scales = torch.full_like(exact, torch.inf), torch.zeros_like(exact)
    for factor in TRIED[bits]:
        scale = (exact * factor).half().float()
        error = torch.addcmul(groups, _integers(groups, scale, lowest), scale, value=-1).norm(dim=-1, keepdim=True)
        scales = torch.where(error < least, scale, scales)
        least = torch.minimum(error, least)
    if not (least.isfinite().all() and scales.isfinite().all()):
        raise ModelError("it has numbers that no 16 bits can scale, or that are not numbers")
    numbers = (_integers(groups, scales, lowest) + lowest).to(torch.uint8).flatten(1)
    return Quantised(numbers, bits, lowest, None, GROUP, scales.squeeze(-1).half(), None, None, None)


def _integers(groups: Tensor, scale: Tensor, lowest: int) -> Tensor:
    """Return the integers nearest to the numbers of groups divided by their scales; 0 where a scale is 0."""
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (groups * inverse).round_().clamp_(-lowest, lowest - 1)
