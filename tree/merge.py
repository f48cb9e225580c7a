"""Merging the trees that several drafts propose for one row into one tree.

This module knows trees only.  SpecInfer (arXiv 2305.09781, Definition 3.2) merges trees as sets of paths;
here every draw is kept, because verification is exact only if each draw is tested against the law it came
from.
"""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.errors import TreeError

from .forest import Forest
from .token_tree import TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the union of trees by path: all draws, all laws, of scores the largest.

    Associative and commutative: any grouping and any order give an equal tree.

    Args:
        trees: at least one; of one root token and one kind, each from drafts of its own.

    Raises:
        TreeError: roots or kinds differ, or two trees hold draws of the same draft.
    """
    _check_mergeable(trees)
    return Forest.merged([[tree] for tree in trees])[0]


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
