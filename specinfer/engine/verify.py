"""Verification: which drafted nodes are accepted, and which token comes next, so that the output is the target's.

Knows: one row's tree, and a `TargetView` that answers questions about the target at its nodes.
Does not know: models, tensors, batches, caches.

One step emits the accepted tokens and one more:
    accepted path   the nodes that verification descends through
    bonus token     the target's own token after the accepted path: drawn from p, or from the residual after rejections

Each rule is exact for some kinds of tree only; `specinfer certify` checks this by enumeration:

    ranked tree (top-k, best-first)   `ExactMatch`: the target's choice decides, descend while it was drafted
    i.i.d. draws from q               `MultiStep(replacement=True)`: every draw tried once, duplicates tried again
    draws without replacement         `MultiStep(replacement=False)`: q renormalised after each rejection, in draw order
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import InputError, PairingError, TreeError
from specinfer.tree import Kind, TokenTree

Probabilities = NDArray[np.float64]


class TargetView(Protocol):
    """One row's target at the nodes of one tree, and the random numbers that verification may use."""

    def choice(self, node: int) -> int:
        """Return the token that the target itself emits after ``node``: its argmax, or a draw from `distribution`."""

    def distribution(self, node: int) -> Probabilities:
        """Return the target's distribution p after ``node``: float64 (V,), sums to 1."""

    def accepts(self, probability: float) -> bool:
        """Toss a coin that is True with this probability (``u < probability`` with u in [0, 1))."""

    def draw(self, distribution: Probabilities) -> int:
        """Draw one token from a distribution."""


class Verdict(NamedTuple):
    """What verification of one tree decided."""

    path: tuple[int, ...]  # accepted nodes in order of depth, root excluded
    token: int  # the bonus token


class Verifier(ABC):
    """A rule that walks a tree; exact for the kinds of tree it names."""

    @property
    @abstractmethod
    def kinds(self) -> frozenset[Kind]:
        """The kinds of tree for which the output distribution is the target's."""

    @abstractmethod
    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        """Decide the accepted path and the bonus token."""

    def check(self, kind: Kind) -> None:
        """Raise `PairingError` if trees of this kind would bias the output."""
        if kind not in self.kinds:
            raise PairingError(
                f"{type(self).__name__} on a {kind} tree would change the output distribution: it is exact for "
                f"{' or '.join(sorted(self.kinds))} trees only. Use ExactMatch() for ranked trees, "
                "MultiStep(replacement=True) for i.i.d. draws, MultiStep() for draws without replacement"
            )


@dataclass(frozen=True)
class ExactMatch(Verifier):
    """Descend while the target's own choice was drafted; exact for every tree.

    With argmax choices it is greedy verification.  With choices drawn from p it is SpecInfer's naive sampling
    (arXiv 2305.09781, section 4.3).  With choices drawn by shared Gumbel noise it is coupled sampling (Daliri, Musco,
    Suresh, arXiv 2408.07978), whose text does not depend on the tree at all.
    """

    kinds = frozenset(Kind)  # the choice does not depend on the tree

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        """Follow the target's choices through the tree; the first one without a child is the bonus token."""
        path, token = [0], target.choice(0)
        while (child := tree.child(path[-1], token)) is not None:
            path.append(child)
            token = target.choice(child)
        return Verdict(tuple(path[1:]), token)


@dataclass(frozen=True)
class MultiStep(Verifier):
    """Multi-step speculative sampling: one acceptance test per draw, each with the q it was drawn from.

    It is SpecInfer's Algorithm 2 (arXiv 2305.09781) with replacement, and Sequoia's (arXiv 2402.12374) without.  On a
    chain both are speculative sampling (arXiv 2211.17192, 2302.01318).  Symbols: p is the target's distribution, q is
    a draft's.  A token that was drawn twice, or by two drafts, is tested once per draw.

    Args:
        replacement: whether the tree's children were drawn with replacement.
    """

    replacement: bool = False

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kind of draws the test divides by."""
        return frozenset({Kind.IID if self.replacement else Kind.WITHOUT_REPLACEMENT})

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        """Descend through accepted draws; after the last one, draw the bonus token from p or its residual.

        Raises:
            PairingError: the tree is a record without its distributions (`TokenTree.without_distributions`).
            TreeError: a distribution is over another vocabulary than the target's.
        """
        if len(tree) > 1 and not tree.distributions:
            raise PairingError("this tree has no distributions (any more), and acceptance divides by them")
        path = [0]
        while True:
            child, p = self._accepted_child(tree, path[-1], target)
            if child is None:
                return Verdict(tuple(path[1:]), target.draw(p))
            path.append(child)

    def _accepted_child(self, tree: TokenTree, node: int, target: TargetView) -> tuple[int | None, Probabilities]:
        """Test the draws under a node in order; return the accepted child, or None and the residual distribution."""
        p = target.distribution(node)
        remaining: dict[int, Probabilities] = {}  # each draft's q, without what was rejected
        for draw, child in tree.draws_under(node):
            if draw.draft not in remaining:
                remaining[draw.draft] = tree.distributions[node, draw.draft].copy()
                if len(remaining[draw.draft]) != len(p):
                    raise TreeError(
                        f"draft {draw.draft} drew from {len(remaining[draw.draft])} tokens, the target from {len(p)}: "
                        "report the probability of each, 0 of those that are never drawn"
                    )
            q, token = remaining[draw.draft], int(tree.tokens[child])
            if target.accepts(min(1.0, p[token] / q[token])):
                return child, p
            p = residual(p, q)
            if not self.replacement:
                q[token] = 0.0
                q /= max(float(q.sum()), np.finfo(np.float64).tiny)
        return None, p


def chosen_verifier(verifier: object, kind: Kind) -> Verifier:
    """Return the verifier for trees of a kind; None is the usual one, which is exact for them.

    Raises:
        InputError: not a verifier.
        PairingError: it would be biased on such trees.
    """
    if verifier is None:
        return ExactMatch() if kind is Kind.RANKED else MultiStep(replacement=kind is Kind.IID)
    if not isinstance(verifier, Verifier):
        raise InputError(f"verifier={verifier!r:.60} is not one: give ExactMatch(), MultiStep(), or None for the usual")
    verifier.check(kind)
    return verifier


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """Return norm(max(p - q, 0)), the rest of p after a draw from q was rejected; p if nothing is left."""
    rest = np.maximum(p - q, 0.0)
    total = float(rest.sum())
    return rest / total if total > 0.0 else p
