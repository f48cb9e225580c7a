"""Which tokens become children of a node: the likeliest, or draws from a distribution.

Knows: log-probabilities on any device.  Does not know: models, trees.
"""

from math import inf, isqrt

import torch
from torch import Tensor


def top_candidates(log_probs: Tensor, k: int, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the indices and values of the k largest of (..., V), descending, ties by the smaller index.

    Exact and quick for large V.  The k largest lie in the k blocks that come first by (maximum descending, index
    ascending), so only these blocks are sorted.

    Args:
        log_probs: (..., V).
        k: how many; V if that is less.
        block: the block size, which affects the time only.  By default the one that sorts the fewest values.

    Returns:
        tokens: (..., min(k, V)) int64.
        values: (..., min(k, V)).
    """
    vocab = log_probs.shape[-1]
    block = block or max(1, isqrt(vocab // max(1, k)))  # vocab / block maxima and k * block values are sorted
    if vocab <= 2 * k * block:
        values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
        return tokens[..., :k], values[..., :k]
    maxima = log_probs[..., : vocab - vocab % block].unflatten(-1, (-1, block)).amax(-1)  # (..., V // block)
    if vocab % block:
        maxima = torch.cat((maxima, log_probs[..., -(vocab % block) :].amax(-1, keepdim=True)), -1)
    blocks = maxima.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(dim=-1).values  # (..., k) ascending
    ids = (blocks[..., None] * block + torch.arange(block, device=log_probs.device)).flatten(-2)  # (..., k * block)
    found = log_probs.gather(-1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -inf)
    values, columns = found.sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, columns[..., :k]), values[..., :k]


def draw_candidates(
    log_probs: Tensor, k: int, replacement: bool, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw k tokens from each of the distributions exp(log_probs), normalised, in float64.

    With replacement: by inverting the cumulative distribution.  Without: by an exponential race.  With independent
    exponential E, sorting q / E in descending order is the same as drawing one by one and renormalising.

    Args:
        log_probs: (..., V); -inf = probability zero, never drawn.
        k: how many draws.
        replacement: whether a token may be drawn again.
        generator: None = torch's default one of the device.

    Returns:
        tokens: (..., k) int64 in drawing order; min(k, V) without replacement.
        log_probs: of the tokens under the distribution, same shape; -inf = no token was left to draw.
        distributions: (..., V) float64; all zero where every log-probability is -inf.
    """
    largest = log_probs.amax(-1, keepdim=True).double().clamp(min=-1e300)
    weights = (log_probs.double() - largest).exp()
    distributions = weights / weights.sum(-1, keepdim=True).clamp(min=1)  # the largest weight is 1
    if replacement:
        cumulative = distributions.cumsum(-1)
        uniform = torch.rand((*weights.shape[:-1], k), dtype=weights.dtype, device=weights.device, generator=generator)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
        tokens.clamp_(max=distributions.shape[-1] - 1)  # where the distribution is all zero
    else:
        race = torch.empty_like(distributions).exponential_(generator=generator).clamp_(min=1e-300)
        tokens, _ = top_candidates(distributions / race, k)
    return tokens, distributions.gather(-1, tokens).log(), distributions
