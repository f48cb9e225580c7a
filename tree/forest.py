"""The trees of a batch, as arrays: merged, cut and laid out all at once; a `TokenTree` for who looks at one.

This module knows that rows belong together.  How arrays are worked on is `nodes`' affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from specinfer.errors import TreeError
from specinfer.tree.nodes import Listed, Nodes, bare, joined, planted, side_by_side
from specinfer.tree.token_tree import Kind, TokenTree, check_ranked


class Forest(Sequence[TokenTree]):
    """The token trees of B rows, all of one kind; every tree is made when it is asked for.

    Args:
        kind: how children were chosen.
        roots: the root token of each row.
        nodes: the trees as arrays; or else
        listed: their nodes in any order, which are put in order when they are needed: not if they are merged before.
            Trees of neither are bare.
    """

    def __init__(
        self, kind: Kind, roots: Sequence[int], nodes: Nodes | None = None, listed: Listed | None = None
    ) -> None:
        self.kind, self.roots, self._listed = kind, list(roots), listed
        self._trees: dict[int, TokenTree] = {}
        self._bare = nodes is None and listed is None
        if nodes is not None:
            self.nodes = nodes

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Return trees, at least one and all of one kind, as a forest."""
        if isinstance(trees, Forest):
            return trees
        _check_kinds(tree.kind for tree in trees)
        roots = [int(tree.tokens[0]) for tree in trees]
        forest = cls(trees[0].kind, roots, side_by_side([tree.nodes for tree in trees]))
        forest._trees = dict(enumerate(trees))
        return forest

    @classmethod
    def merged(cls, forests: Sequence[Sequence[TokenTree]]) -> Forest:
        """Return the union, row by row, of trees from drafts of their own that grow from the same roots.

        All draws are kept, all distributions, and of scores the largest, for verification is exact only if each draw is
        tested against the distribution it came from.  (SpecInfer, arXiv 2305.09781, Definition 3.2, merges trees as
        sets of paths.)

        Raises:
            TreeError: rows, roots or kinds differ, or two forests hold draws of the same draft.
        """
        every = [cls.of(trees) for trees in forests]
        _check_mergeable(every)
        grown = [forest for forest in every if forest.num_drafted] or every[:1]
        if len(grown) == 1:
            return grown[0]
        first = grown[0]
        return cls(first.kind, first.roots, listed=joined([forest.listed for forest in grown], len(first)))

    @cached_property
    def nodes(self) -> Nodes:
        """The trees as arrays."""
        return bare(self.roots) if self._listed is None else planted(self._listed)

    @cached_property
    def listed(self) -> Listed:
        """The trees' nodes, the roots first."""
        return self._listed if self._listed is not None else self.nodes.listed()

    @property
    def drafts(self) -> np.ndarray:
        """The draft of every draw, (K,)."""
        return self._known.draws.drafts

    @property
    def num_drafted(self) -> int:
        """Nodes of all trees, roots excluded; equal paths that are yet to be merged count apart."""
        return 0 if self._bare else len(self._known.tokens) - len(self)

    @property
    def _known(self) -> Listed | Nodes:
        return self._listed if self._listed is not None else self.nodes

    def pruned(self, depths: Sequence[int]) -> Forest:
        """Return the trees without the nodes deeper than a depth, one for each row."""
        if not self.num_drafted:
            return self
        nodes = self.nodes.pruned(depths)
        return self if nodes is self.nodes else Forest(self.kind, self.roots, nodes)

    def best(self, count: int, worth: np.ndarray | Sequence[float] | None = None) -> Forest:
        """Return the `count` drafted nodes of each tree that are worth most: see `TokenTree.best`.

        Args:
            count: drafted nodes of a tree at most.
            worth: (N,) of all trees' nodes, row after row; their scores when None.

        Raises:
            TreeError: sampled trees.
        """
        if self.num_drafted <= count or self.nodes.sizes.max() - 1 <= count:
            return self
        check_ranked(self.kind)
        nodes = self.nodes.best(count, self.nodes.scores if worth is None else worth)
        return Forest(self.kind, self.roots, nodes)

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

    def __iter__(self) -> Iterator[TokenTree]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Forest({list(self)!r})"


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the union of trees by path: all draws, all distributions, of scores the largest.

    Associative and commutative: any grouping and any order give an equal tree.

    Args:
        trees: at least one; of one root token and one kind, each from drafts of its own.

    Raises:
        TreeError: roots or kinds differ, or two trees hold draws of the same draft.
    """
    if not trees:
        raise TreeError("nothing to merge: give at least one tree")
    return Forest.merged([[tree] for tree in trees])[0]


def _check_mergeable(forests: Sequence[Forest]) -> None:
    """Raise TreeError unless forests grow from the same roots, of one kind, by drafts of their own."""
    if len(forests) == 1:
        return
    _check_kinds(forest.kind for forest in forests)
    if len(rows := {len(forest) for forest in forests}) > 1:
        raise TreeError(f"drafts proposed trees for {' and '.join(map(str, sorted(rows)))} rows: one tree a row, each")
    for row, roots in enumerate(zip(*(forest.roots for forest in forests), strict=True)):
        if len(set(roots)) > 1:
            found = sorted(set(roots))
            raise TreeError(f"row {row}: the roots are different tokens, {found}; merge the trees of one row")
    seen: set[int] = set()
    for forest in (own for own in forests if own.num_drafted):
        drafts = set(np.unique(forest.drafts).tolist())
        if shared := seen & drafts:
            raise TreeError(f"draft {min(shared)} drew in two trees; grow each draft's tree with its own draft id")
        seen |= drafts


def _check_kinds(kinds: Iterable[Kind]) -> None:
    if len(found := set(kinds)) > 1:
        names = ", ".join(sorted(found))
        raise TreeError(f"the trees are of different kinds ({names}), and no verifier is exact for a mixture")
