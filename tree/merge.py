"""Merging the trees that several drafts propose for one row into one tree.

This module knows trees only.  SpecInfer (arXiv 2305.09781, Definition 3.2) merges trees as sets of paths;
here every draw is kept, because verification is exact only if each draw is tested against the law it came
from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specinfer.errors import TreeError

from .token_tree import Draw, TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the union of trees by path: all draws, all laws, of scores the largest.

    Associative and commutative: any grouping and any order give an equal tree.

    Args:
        trees: at least one; of one root token and one kind, each from drafts of its own.

    Raises:
        TreeError: roots or kinds differ, or two trees hold draws of the same draft.
    """
    _check_mergeable(trees)
    grown = [tree for tree in trees if tree.num_drafted] or trees[:1]
    if len(grown) == 1:
        return grown[0]
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    draws: list[Sequence[Draw]] = []
    laws: dict[tuple[int, int], np.ndarray] = {}
    for tree in grown:
        shift = len(tokens) - 1  # node 1 of this tree goes to the end of the list; node 0 is -1
        place = [-1, *range(shift + 1, shift + len(tree))]
        tokens += tree.tokens[1:].tolist()
        parents += [place[p] for p in tree.parents[1:].tolist()]
        scores += tree.scores[1:].tolist()
        draws += tree.draws[1:]
        laws |= {(place[p], draft): law for (p, draft), law in tree.laws.items()}
    return TokenTree.from_nodes(int(trees[0].tokens[0]), tokens, parents, scores, draws, laws, trees[0].kind)


def _check_mergeable(trees: Sequence[TokenTree]) -> None:
    if not trees:
        raise TreeError("nothing to merge: give at least one tree")
    if len(roots := {int(tree.tokens[0]) for tree in trees}) > 1:
        raise TreeError(f"node 0: the roots are different tokens, {sorted(roots)}; merge the trees of one row")
    if len(kinds := {tree.kind for tree in trees}) > 1:
        names = ", ".join(sorted(kinds))
        raise TreeError(f"the trees are of different kinds ({names}), and no verifier is exact for a mixture")
    seen: set[int] = set()
    for tree in trees:
        drafts = {draw.draft for draws in tree.draws for draw in draws}
        if shared := seen & drafts:
            raise TreeError(f"draft {min(shared)} drew in two trees; grow each draft's tree with its own draft id")
        seen |= drafts
