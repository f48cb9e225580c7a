"""Weights rounded to integers of few bits with a scale for 32 inputs each, written as the numbers they then are.

Knows: the numbers of 8 and of 4 bits, which weights of a model are rounded.  Does not know: how they are multiplied.

    int8    integers from -127 to 127 times a power of two (MXINT8 of the OCP Microscaling Formats specification 1.0,
            section 5.3, whose scale is 64 times as large)
    int4    integers from -8 to 7 times a number of five significant bits; of the scales that fit the number of largest
            magnitude, the one of the least squared error

All of these are bfloat16 numbers.  So a rounded model stays an ordinary model, in bfloat16 or float32, and scale and
integers are found in its weights again (`integers`).  Nothing else needs to be kept.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specinfer.errors import UnsupportedModel

GROUP = 32  # inputs that share a scale
LARGEST = {"int8": 127, "int4": 8}  # magnitude of an integer
SIGNIFICANT = 32  # scales of int4 have mantissas of as many 32nds
TRIED = (1.0, 0.96, 0.92, 0.88)  # scales of int4, by the one that leaves the number of largest magnitude as it is
SMALLEST = 2.0**-100  # a scale, at least
PART = 4096  # outputs that are rounded at a time
WORTH = 0.5  # of the parameters must be in layers that are rounded


@torch.no_grad()
def round_weights(model: Any, form: str) -> float:
    """Round the weights of a model's linear layers in place, to the nearest numbers; return their share of its weights.

    The output embeddings, and the input embeddings if they are the same, are rounded to 8 bits in either form.

    Args:
        model: in bfloat16 or float32 on a CPU.
        form: "int8" or "int4".

    Raises:
        UnsupportedModel: most of its weights are not in linear layers, or not in such with a multiple of 32 inputs.
    """
    output = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and not layer.in_features % GROUP]
    weights = {layer.weight: "int8" if layer is output else form for layer in layers}
    share = sum(weight.numel() for weight in weights) / sum(weight.numel() for weight in model.parameters())
    if share < WORTH:
        what = f"only {share:.0%} of its weights are in linear layers with a multiple of {GROUP} inputs"
        raise UnsupportedModel(f"{type(model).__name__} cannot be rounded to {form}: {what}")
    for weight, kind in weights.items():
        for part in weight.split(PART):
            part.copy_(rounded(part, kind))
    return share


def rounded(weight: Tensor, form: str) -> Tensor:
    """Return a weight (N, K), K a multiple of 32, rounded to the numbers of a form, in its own type."""
    groups = _grouped(weight)
    if form == "int8":
        return _nearest(groups, _power(groups), 127)[0].view_as(weight).to(weight.dtype)
    exact = -_extreme(groups) / LARGEST["int4"]
    best, least = groups, torch.full_like(exact, torch.inf)
    for factor in TRIED:
        found, error = _nearest(groups, _short(exact * factor), 7)
        best = torch.where(error < least, found, best)
        least = torch.minimum(error, least)
    return best.view_as(weight).to(weight.dtype)


def integers(weight: Tensor, form: str) -> tuple[Tensor, Tensor] | None:
    """Return the integers (N, K), float32, and scales (N, K / 32) of a rounded weight; None if it is not rounded so."""
    if weight.shape[1] % GROUP:
        return None
    groups = _grouped(weight)
    scales = _power(groups) if form == "int8" else _short(-_extreme(groups) / LARGEST["int4"])
    found = groups / scales
    highest = LARGEST["int8"] if form == "int8" else LARGEST["int4"] - 1
    if not torch.equal(found.round(), found) or found.amax() > highest:
        return None
    return found.view_as(weight), scales.squeeze(-1)


def _grouped(weight: Tensor) -> Tensor:
    return weight.detach().float().view(len(weight), -1, GROUP)


def _power(groups: Tensor) -> Tensor:
    """Return the power of two by which the largest magnitude of each group is from 64 to 128."""
    largest = groups.abs().amax(-1, keepdim=True)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 7).clamp(min=SMALLEST)


def _extreme(groups: Tensor) -> Tensor:
    """Return each group's number of largest magnitude, with its sign."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    return torch.where(-low > high, low, high)


def _short(scales: Tensor) -> Tensor:
    """Return scales with five significant bits."""
    mantissas, exponents = torch.frexp(scales)
    short = torch.ldexp((mantissas * SIGNIFICANT).round_() / SIGNIFICANT, exponents)
    return torch.where(short.abs() < SMALLEST, SMALLEST, short)


def _nearest(groups: Tensor, scales: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return the nearest numbers of some scales, and their squared error (N, groups, 1)."""
    lowest = -highest - (highest == 7)
    found = (groups / scales).round_().clamp_(lowest, highest) * scales
    return found, (found - groups).square_().sum(-1, keepdim=True)
