"""The trees of a batch, as arrays: merged, cut and laid out all at once; a `TokenTree` for who looks at one.

This module knows that rows belong together.  How arrays are worked on is `nodes`' affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from .nodes import Listed, Nodes, joined, planted, side_by_side
from .token_tree import Kind, TokenTree, check_ranked


class Forest(Sequence[TokenTree]):
    """The token trees of B rows, all of one kind; every tree is made when it is asked for.

    Args:
        kind: how children were chosen.
        nodes: the trees as arrays; or else
        listed: their nodes in any order, which are put in order when they are needed: not if they are merged before.
    """

    def __init__(self, kind: Kind, nodes: Nodes | None = None, listed: Listed | None = None) -> None:
        self.kind, self._listed = kind, listed
        self._trees: dict[int, TokenTree] = {}
        if nodes is not None:
            self.nodes = nodes

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Return trees, at least one and all of one kind, as a forest."""
        if isinstance(trees, Forest):
            return trees
        forest = cls(trees[0].kind, side_by_side([tree.nodes for tree in trees]))
        forest._trees = dict(enumerate(trees))
        return forest

    @classmethod
    def bare(cls, roots: Sequence[int], kind: Kind = Kind.RANKED) -> Forest:
        """Return trees that draft nothing."""
        return cls.of([TokenTree.root_only(root, kind) for root in roots])

    @classmethod
    def merged(cls, forests: Sequence[Sequence[TokenTree]]) -> Forest:
        """Return the union, row by row, of trees from drafts of their own that grow from the same roots.

        All draws are kept, all laws, and of scores the largest, for verification is exact only if each draw is tested
        against the law it came from.  (SpecInfer, arXiv 2305.09781, Definition 3.2, merges trees as sets of paths.)
        """
        every = [cls.of(trees) for trees in forests]
        grown = [forest for forest in every if forest.num_drafted] or every[:1]
        if len(grown) == 1:
            return grown[0]
        return cls(grown[0].kind, listed=joined([forest.listed for forest in grown], len(grown[0])))

    @cached_property
    def nodes(self) -> Nodes:
        """The trees as arrays."""
        assert self._listed is not None
        return planted(self._listed)

    @property
    def listed(self) -> Listed:
        """The trees' nodes, the roots first."""
        return self._listed if self._listed is not None else self.nodes.listed()

    @property
    def roots(self) -> list[int]:
        """The root token of each tree."""
        return self.nodes.tokens[self.nodes.starts[:-1]].tolist()

    @property
    def num_drafted(self) -> int:
        """Nodes of all trees, roots excluded; equal paths that are yet to be merged count apart."""
        known = self._listed.tokens if self._listed is not None else self.nodes
        return len(known) - len(self)

    def pruned(self, depths: Sequence[int]) -> Forest:
        """Return the trees without the nodes deeper than a depth, one for each row."""
        nodes = self.nodes.pruned(depths)
        return self if nodes is self.nodes else Forest(self.kind, nodes)

    def best(self, count: int, worth: np.ndarray | None = None) -> Forest:
        """Return the `count` drafted nodes of each tree that are worth most: see `TokenTree.best`.

        Args:
            count: drafted nodes of a tree at most.
            worth: (N,) of all trees' nodes, row after row; their scores when None.

        Raises:
            TreeError: sampled trees.
        """
        if self.nodes.sizes.max() - 1 <= count:
            return self
        check_ranked(self.kind)
        return Forest(self.kind, self.nodes.best(count, self.nodes.scores if worth is None else worth))

    def __len__(self) -> int:
        """Return B, the number of rows."""
        if self._listed is not None:
            return int(np.count_nonzero(self._listed.parents < 0))
        return len(self.nodes.sizes)

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
