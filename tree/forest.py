"""The trees of a batch: merged and cut all at once.  A row becomes a `TokenTree` only when it is asked for.

Knows: which rows and drafts belong together.  Does not know: how the arrays are computed (`nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from specinfer.errors import TreeError
from specinfer.tree.nodes import Listed, Nodes, in_order, joined, roots_only
from specinfer.tree.token_tree import Kind, TokenTree, check_ranked


class Forest(Sequence[TokenTree]):
    """The token trees of B rows, all of one kind.

    Args:
        kind: how children were chosen.
        roots: the root token of each row.
        listed: the nodes, in any order; they are put in order when needed.  None = the trees draft nothing.
    """

    def __init__(self, kind: Kind, roots: Sequence[int], listed: Listed | Nodes | None = None) -> None:
        self.kind, self.roots = kind, list(roots)
        self._listed = roots_only(roots) if listed is None else listed
        self._trees: dict[int, TokenTree] = {}

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Return trees, at least one and all of one kind, as a forest."""
        if isinstance(trees, Forest):
            return trees
        _check_kinds(tree.kind for tree in trees)
        roots = [int(tree.tokens[0]) for tree in trees]
        forest = cls(trees[0].kind, roots, joined([tree.nodes for tree in trees], distinct=True))
        forest._trees = dict(enumerate(trees))
        return forest

    @classmethod
    def merged(cls, forests: Sequence[Sequence[TokenTree]]) -> Forest:
        """Return the union, row by row, of trees from different drafts that grow from the same roots.

        It keeps all draws, all distributions, and the largest score of each path: verification is exact only if each
        draw is tested against the distribution it came from.  (SpecInfer, arXiv 2305.09781, Definition 3.2, merges
        trees as sets of paths.)

        Raises:
            TreeError: rows, roots or kinds differ, or two forests hold draws of the same draft.
        """
        every = [cls.of(trees) for trees in forests]
        _check_mergeable(every)
        grown = [forest for forest in every if len(forest._drafts)] or every[:1]
        if len(grown) == 1:
            return grown[0]
        return cls(grown[0].kind, grown[0].roots, joined([forest._listed for forest in grown]))

    @cached_property
    def nodes(self) -> Nodes:
        """The trees as arrays."""
        return self._listed if isinstance(self._listed, Nodes) else in_order(self._listed, len(self))

    @property
    def _drafts(self) -> np.ndarray:
        """The draft of every draw, (K,)."""
        return self._listed.draws.drafts

    def pruned(self, depths: Sequence[int]) -> Forest:
        """Return the trees without the nodes that are deeper than their row's depth."""
        return self._with(self.nodes.pruned(depths))

    def best(self, count: int, worth: np.ndarray | Sequence[float] | None = None, together: bool = False) -> Forest:
        """Return the `count` drafted nodes of each tree that are worth most: see `TokenTree.best`.

        Args:
            count: the most drafted nodes of a tree.
            worth: (N,) of all trees' nodes, row after row; None = their scores.
            together: whether the count is of all trees instead.

        Raises:
            TreeError: sampled trees.
        """
        if (len(self.nodes) - len(self) if together else self.nodes.sizes.max() - 1) <= count:
            return self
        check_ranked(self.kind)
        return self._with(self.nodes.best(count, self.nodes.scores if worth is None else worth, together))

    def _with(self, nodes: Nodes) -> Forest:
        return self if nodes is self.nodes else Forest(self.kind, self.roots, nodes)

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return len(self.roots)

    @overload
    def __getitem__(self, row: int) -> TokenTree: ...

    @overload
    def __getitem__(self, row: slice) -> list[TokenTree]: ...

    def __getitem__(self, row: int | slice) -> TokenTree | list[TokenTree]:
        if isinstance(row, slice):
            return list(self)[row]
        row = range(len(self))[row]
        if row not in self._trees:
            self._trees[row] = TokenTree.of(self.nodes.row(row), self.kind)
        return self._trees[row]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Forest({list(self)!r})"


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the union of trees by path: all draws, all distributions, and the largest score of each path.

    Associative and commutative: any grouping and any order give an equal tree.

    Args:
        trees: at least one; of one root token and one kind, each from different drafts.

    Raises:
        TreeError: roots or kinds differ, or two trees hold draws of the same draft.
    """
    if not trees:
        raise TreeError("nothing to merge: give at least one tree")
    return Forest.merged([[tree] for tree in trees])[0]


def _check_mergeable(forests: Sequence[Forest]) -> None:
    """Raise TreeError unless forests are of one kind, with the same roots, from different drafts."""
    if len(forests) == 1:
        return
    _check_kinds(forest.kind for forest in forests)
    if len(rows := {len(forest) for forest in forests}) > 1:
        raise TreeError(f"drafts proposed trees for {' and '.join(map(str, sorted(rows)))} rows: one tree a row, each")
    for row, roots in enumerate(zip(*(forest.roots for forest in forests), strict=True)):
        if len(found := sorted(set(roots))) > 1:
            raise TreeError(f"row {row}: the roots are different tokens, {found}; merge the trees of one row")
    seen: set[int] = set()
    for drafts in (set(forest._drafts.tolist()) for forest in forests):
        if shared := seen & drafts:
            raise TreeError(f"draft {min(shared)} drew in two trees; grow each draft's tree with its own draft id")
        seen |= drafts


def _check_kinds(kinds: Iterable[Kind]) -> None:
    if len(found := set(kinds)) > 1:
        names = ", ".join(sorted(found))
        raise TreeError(f"the trees are of different kinds ({names}), and no verifier is exact for a mixture")
