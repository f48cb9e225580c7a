"""The most that any verification rule can accept among the draws under a node: an optimal transport problem.

Knows: distributions p (the target's) and q (a draft's) after one node.  Does not know: rules, trees, texts.

A rule that emits exactly p is a coupling of the emitted token Y with the draws X_1 ... X_K, and it accepts when Y is
one of them (SpecTr, arXiv 2310.15141).  Let mass flow from tokens y, which supply p(y), to sequences of draws x, which
take P(x), wherever y is in x: the largest flow is the largest probability of acceptance.  By max-flow min-cut it is the
least, over sets H of tokens, of p(H) for the suppliers that are cut and 1 - P(all draws are in H) for the sequences
that the other tokens reach:

    largest P(Y is drawn) = 1 + min over H of p(H) - P(all draws are in H)

(arXiv 2502.18779; 2511.15898 also finds the rule that reaches it).  Only the sets of the tokens with the least p / q
need be tried.  With replacement, P(all draws are in H) = q(H)^K is convex in q(H), so it is the largest of its
tangents, and the best H for a tangent of slope c is {p < c q}.  Two draws without replacement are in H with probability

    sum over i in H of q_i (q(H) - q_i) / (1 - q_i) = q(H) - (1 - q(H)) sum over i in H of q_i / (1 - q_i)

which grows by more, per q, the larger H is, so the same sets are the best.  For more draws there is no sum over single
tokens: their bound is not known here.
"""

import torch
from torch import Tensor

WITHOUT = 2  # draws without replacement whose bound is known, at most


def best_acceptance(p: Tensor, q: Tensor, draws: int, replacement: bool) -> Tensor:
    """Return the largest probability that a draw is accepted, over all rules that emit exactly p.

    Args:
        p, q: (V,) distributions; q may be all zero, which draws nothing.
        draws: K.
        replacement: whether tokens are drawn with replacement.

    Returns:
        (K,) float64, for 1 ... K draws; without replacement, for at most `WITHOUT`.
    """
    drawn = q > 0
    p, q = p[drawn].double(), q[drawn].double()
    order = (p / q).argsort()
    p, q = p[order], q[order] / q.sum()
    mass = _sums(q)
    if replacement:
        inside = torch.stack([mass**count for count in range(1, draws + 1)])
    else:
        others = _sums(q.flip(0)).flip(0)  # 1 - mass, accurate where that is tiny
        odds = q / (mass[:-1] + others[1:]).clamp(min=torch.finfo(q.dtype).tiny)
        inside = torch.stack([mass, mass - others * _sums(odds)][:draws])
    inside[:, -1] = 1.0  # of all tokens
    return (1 + (_sums(p) - inside).min(1).values).clamp(min=0)


def _sums(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ... values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])
