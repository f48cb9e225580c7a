"""The probability that an emitted token was drafted and accepted, in closed form.

Knows: distributions p (the target's) and q (a draft's) after one node, and the rules of `verify`.
Does not know: trees, texts, models.

A rule that emits exactly p emits a token y in two ways: as an accepted draw, or as the bonus token after all K draws
under the node were rejected.  Let R_m be the probability that the first m draws are rejected and U_m the residual then,
weighted by it; U_0 = p, R_0 = 1.  With q_m the distribution of draw m (q, or q renormalised without what was drawn
before),

    U_m = max(U_(m-1) - R_(m-1) q_m, 0),    R_m = sum U_m

(SpecInfer, arXiv 2305.09781, Algorithm 2; Sequoia, arXiv 2402.12374).  Let Z_m be the mass of q after m draws are taken
out of it (1 with replacement).  Rejected tokens have nothing left in U_m, and the maxima nest, so that for every token

    U_m = max(p - c_m q, 0)    with    c_m = R_0 / Z_0 + ... + R_(m-1) / Z_(m-1)

and y was accepted with probability min(p(y), c_K q(y)), given that it was emitted with min(1, c_K q(y) / p(y)).  One
draw is speculative sampling: c_1 = 1.  With replacement c_K is a number, the expected count of draws that are tested,
and some draw is accepted with probability 1 - R_K = 1 - (c_(K+1) - c_K).
Without, it depends on the rejected tokens, and one sequence of these is drawn per node.  The mean over many nodes has
little noise, since probabilities of acceptance are averaged instead of outcomes (Rao-Blackwell).
"""

from collections.abc import Callable
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
# (level, draws K under its node) -> (n, K + 1): the probability that the token was accepted and drawn m times
Level = Callable[[int, int], Floats]


def expected_tests(p: Tensor, q: Tensor, draws: int) -> Tensor:
    """Return c_1 ... c_K for draws with replacement.

    Args:
        p, q: (..., V) distributions; q may be all zero, which draws nothing.
        draws: K.

    Returns:
        (..., K), ascending from 1.
    """
    tests = torch.ones_like(p[..., :1])
    columns = [tests]
    for _ in range(draws - 1):
        tests = tests + (p - tests * q).clamp_(min=0).sum(-1, keepdim=True)
        columns.append(tests)
    return torch.cat(columns, -1)


def accepted_without_replacement(
    p: Tensor, q: Tensor, token: int, draws: int, chance: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the probability that one of 1 ... K draws without replacement is accepted, (K,), in two ways.

    First given that a token was emitted, then whichever is.  Both are given one sequence of rejected draws, which is
    drawn here: unbiased estimates, exact for K = 1.

    Args:
        p, q: (V,) distributions, p(token) > 0.
        token: y.
        draws: K.
        chance: for the rejected draws.
    """
    left = q.clone()  # q without the drawn tokens
    before, mass = p.new_tensor((0.0, 1.0))  # c_(m-1) and R_(m-1)
    tests, masses = [], []
    for _ in range(draws):
        total = left.sum()  # Z_(m-1)
        now = before + mass / total if total > 0 else before
        tests.append(now)
        rejected = (now * left - p).relu() - (before * left - p).relu()  # draw m's distribution, times R_m
        cumulative = rejected.cumsum(0)
        drawn = torch.rand(1, generator=chance, dtype=p.dtype, device="cpu") * cumulative[-1]
        left[torch.searchsorted(cumulative, drawn, right=True).clamp_(max=len(p) - 1)] = 0
        before, mass = now, (p - now * q).clamp_(min=0).sum()
        masses.append(mass)
    return (torch.stack(tests) * q[token] / p[token]).clamp(max=1), 1 - torch.stack(masses)


def naive(q: Floats, draws: int) -> Floats:
    """Return P(y is drawn m times), m = 0 ... K, of independent draws: the target's own choice is accepted if drawn.

    Args:
        q: (n,) the draft's probabilities of the emitted tokens.
        draws: K.

    Returns:
        (n, K + 1).
    """
    return np.stack([comb(draws, m) * q**m * (1 - q) ** (draws - m) for m in range(draws + 1)], 1)


def multi_step(p: Floats, q: Floats, tests: Floats, draws: int) -> Floats:
    """Return P(y was accepted and drawn m times), m = 0 ... K, of draws with replacement, given that y was emitted.

    While y can still be accepted, no earlier draw was y: it would have been accepted.  Later draws may be anything.

    Args:
        p, q: (n,) probabilities of the emitted tokens, p positive.
        tests: (n, K or more) from `expected_tests`.
        draws: K.

    Returns:
        (n, K + 1); column 0 is 1 minus the sum of the others.
    """
    reached = np.minimum(1.0, tests[:, :draws] * (q / p)[:, None])  # accepted within 1 ... K draws
    shares = np.diff(reached, axis=1, prepend=0.0)  # ... at draw t
    table = np.zeros((len(p), draws + 1))
    for t in range(draws):
        table[:, 1 : draws - t + 1] += shares[:, t : t + 1] * naive(q, draws - t - 1)
    table[:, 0] = 1 - table[:, 1:].sum(1)
    return table


def alive(widths: tuple[int, ...], level: Level, n: int) -> list[dict[int, Floats]]:
    """Return how likely the accepted path is to reach depth 0, 1, ..., for trees of `widths` draws per draw.

    A token drawn m times has m times as many draws under it.

    Args:
        widths: draws under every draw, by level.
        level: the probabilities of the outcomes of the draws under a node.
        n: trees.

    Returns:
        Per depth, by draws under the path's end, the probability (n,).  At the last depth there is one "draw" for each
        time that the token was drawn.
    """
    found: list[dict[int, Floats]] = [{(*widths, 1)[0]: np.ones(n)}]
    for depth, width in enumerate((*widths[1:], 1)[: len(widths)]):
        below: dict[int, Floats] = {}
        for draws, probability in found[-1].items():
            for times, share in enumerate(level(depth, draws).T[1:], 1):
                below[times * width] = below.get(times * width, 0.0) + probability * share
        found.append(below)
    return found
