"""The likeliest tokens by their scores.

Knows: numbers.  Does not know: where scores come from, rows, trees.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specinfer.common import native

SOURCE = Path(__file__).with_name("ranking.cpp")


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of scores, and what their exponentials are shares of.

    In float32 on a CPU with a compiler this is one call: each operator of torch's costs more than the numbers do.

    Args:
        scores: (..., V).
        k: how many; V if that is less.

    Returns:
        indices: (..., k) descending by score, ties by the smaller index; ties at the cut-off may be broken otherwise.
        values: (..., k) their scores.
        total: (..., 1) the logarithm of the sum of the exponentials of all scores.
    """
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or (compiled := library()) is None:
        return _by_torch(scores, k)
    flat = scores.flatten(0, -2)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    (rows, size), shape = flat.shape, scores.shape[:-1]
    k = min(k, size)
    indices, values = scores.new_empty(*shape, k, dtype=torch.long), scores.new_empty(*shape, k)
    total = scores.new_empty(*shape, 1)
    sizes, found = (rows, size, flat.stride(0), k), (values, indices, total)
    compiled.specinfer_largest(flat.data_ptr(), *sizes, *(each.data_ptr() for each in found))
    return indices, values, total


def _by_torch(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with fewer launches on a GPU than `tree.top_candidates` takes for its rule at the cut-off."""
    values, indices = scores.topk(min(k, scores.shape[-1]))
    indices, order = indices.sort(-1)  # `torch.topk` has no rule for ties
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return indices.gather(-1, order), values, scores.logsumexp(-1, keepdim=True)


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled function; None without a compiler."""
    if (found := native.library(SOURCE)) is None:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    found.specinfer_largest.argtypes = [address, number, number, number, number, address, address, address]
    return found
