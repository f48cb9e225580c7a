"""Token trees as arrays: the trees of a whole batch, side by side.

Knows: numbers, and which node is whose parent.  Does not know: models, text.
It makes no objects for nodes or rows: every function works on all nodes of all rows at once.

One rule numbers the nodes of a row, wherever they are listed: the root is node 0, with parent -1; drafted nodes are 1,
2, ... in the order of the list; a parent is given by its number.  It holds for the nodes that a policy asks about and a
draft feeds (`Frontier`), for a grown tree (`Growth`: slot i is node i), for `TokenTree.from_nodes` and recorded trees
(whose lists leave out the root), and for a finished `TokenTree`.

The arrays of this module number the nodes of all rows through.  Roots stand in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Distributions = Mapping[tuple[int, int], np.ndarray]  # (node, draft) -> (V,) float64


class Draws(NamedTuple):
    """Which draft drew which node: K draws.  A node may have several."""

    nodes: Numbers  # (K,)
    drafts: Numbers  # (K,)
    orders: Numbers  # (K,) ascending in drawing order among the draws of one draft under one parent


class Listed(NamedTuple):
    """Nodes of B trees in any order.  A path may be listed several times, that of a root included."""

    tokens: Numbers  # (S,)
    parents: Numbers  # (S,); -1 at the roots
    scores: NDArray[np.float64]  # (S,) log-probability of the path; 0 at the roots
    draws: Draws
    distributions: Distributions


@dataclass(eq=False)
class Nodes:
    """B trees of N nodes in all, row after row, in depth-first pre-order; siblings by score descending, then id."""

    starts: Numbers  # (B + 1,) the root of each row, then N
    tokens: Numbers  # (N,)
    parents: Numbers  # (N,) numbers of nodes count through all rows
    depths: Numbers  # (N,)
    scores: NDArray[np.float64]  # (N,)
    draws: Draws  # by node, then draft, then order
    distributions: Distributions

    def __post_init__(self) -> None:
        for array in (self.tokens, self.parents, self.depths, self.scores, *self.draws):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def sizes(self) -> Numbers:
        """Nodes of each row, the root included, (B,)."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> Numbers:
        """The row of each node, (N,)."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def columns(self) -> Numbers:
        """The number of each node within its row, (N,); 0 at the root."""
        return np.arange(len(self)) - self.starts[self.rows]

    @cached_property
    def subtrees(self) -> Numbers:
        """How many nodes lie below each node, itself included, (N,)."""
        counts = [1] * len(self)
        for node, parent in reversed([*enumerate(self.parents.tolist())]):
            if parent >= 0:
                counts[parent] += counts[node]
        return np.array(counts, np.int64)

    @cached_property
    def proposers(self) -> Numbers:
        """The drafts that drew each node, (N,) bit masks: bit d for draft d."""
        masks = np.zeros(len(self), np.int64)
        np.bitwise_or.at(masks, self.draws.nodes, 1 << self.draws.drafts)
        return masks

    @cached_property
    def ranks(self) -> Numbers:
        """The number of each draw among those of its draft under its parent, (K,): 0, 1, ..."""
        groups = self.parents[self.draws.nodes] << 6 | self.draws.drafts
        order = np.lexsort((self.draws.orders, groups))
        return _inverse(order, _from_first(np.arange(len(order)), groups[order]))

    def row(self, row: int) -> Nodes:
        """Return one row alone."""
        if len(self.sizes) == 1:
            return self
        start, end = self.starts[row : row + 2].tolist()
        if end - start == 1:  # most rows of plain decoding, whose trees are kept with the results
            return replace(BARE, tokens=self.tokens[start:end].copy())
        first, last = np.searchsorted(self.draws.nodes, (start, end))
        nodes, drafts, orders = (column[first:last].copy() for column in self.draws)
        return Nodes(
            np.array([0, end - start]),
            self.tokens[start:end].copy(),  # a row may be kept for long: without the memory of the others
            np.maximum(self.parents[start:end] - start, -1),
            self.depths[start:end].copy(),
            self.scores[start:end].copy(),
            Draws(nodes - start, drafts, orders),
            self._distributions_by_row[row] if self.distributions else {},
        )

    @cached_property
    def _distributions_by_row(self) -> list[dict[tuple[int, int], np.ndarray]]:
        """The distributions of each row, by the nodes' numbers within it."""
        found: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in self.sizes]
        for (parent, draft), distribution in self.distributions.items():
            found[self.rows[parent]][int(self.columns[parent]), draft] = distribution
        return found

    def pruned(self, depths: Sequence[int]) -> Nodes:
        """Return the trees without the nodes that are deeper than their row's depth."""
        if self.depths.max() <= min(depths):
            return self
        return self._kept(self.depths <= np.maximum(depths, 0)[self.rows])

    def best(self, count: int, worth: np.ndarray | Sequence[float], together: bool = False) -> Nodes:
        """Return the `count` drafted nodes of each row that are worth most.  Ties go to the first in node order.

        Args:
            count: the most drafted nodes of a row.
            worth: (N,).  A node that is worth more than its parent counts as its parent does, so ancestors are kept.
                Roots are always kept.
            together: whether the count is of all rows instead.
        """
        least = np.array(worth, np.float64)
        least[self.starts[:-1]] = np.inf
        for depth in range(2, self.depths.max() + 1):
            level = np.flatnonzero(self.depths == depth)
            least[level] = np.minimum(least[level], least[self.parents[level]])
        if together:
            numbers = _inverse(np.argsort(-least, kind="stable"), np.arange(len(self)))  # the roots come first
            return self._kept(numbers < len(self.sizes) + max(count, 0))
        order = np.lexsort((-least, self.rows))
        return self._kept(_inverse(order, self.columns) <= max(count, 0))

    def _kept(self, keep: np.ndarray) -> Nodes:
        """Return some of the nodes; their ancestors are among them."""
        if keep.all():
            return self
        numbers = np.cumsum(keep) - 1  # of the nodes that are kept
        drawn = keep[self.draws.nodes]
        nodes, drafts, orders = (column[drawn] for column in self.draws)
        used = set(zip(self.parents[nodes].tolist(), drafts.tolist(), strict=True)) if self.distributions else set()
        return Nodes(
            np.append(numbers[self.starts[:-1]], numbers[-1] + 1),
            self.tokens[keep],
            np.append(numbers, -1)[self.parents[keep]],
            self.depths[keep],
            self.scores[keep],
            Draws(numbers[nodes], drafts, orders),
            {(int(numbers[p]), d): q for (p, d), q in self.distributions.items() if (p, d) in used},
        )


def roots_only(tokens: Sequence[int] | Numbers) -> Nodes:
    """Return trees that draft nothing."""
    count = len(tokens)
    none, zeros = np.zeros(0, np.int64), np.zeros(count, np.int64)
    draws = Draws(none, none, none)
    return Nodes(np.arange(count + 1), np.array(tokens, np.int64), zeros - 1, zeros, np.zeros(count), draws, {})


BARE = roots_only([0])


def joined(parts: Sequence[Listed | Nodes]) -> Listed | Nodes:
    """Return the nodes of several parts as those of one."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    pairs = list(zip(parts, shifts, strict=False))
    draws = [part.draws._replace(nodes=part.draws.nodes + shift) for part, shift in pairs]
    return Listed(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([np.where(part.parents < 0, -1, part.parents + shift) for part, shift in pairs]),
        np.concatenate([part.scores for part in parts]),
        Draws(*map(np.concatenate, zip(*draws, strict=True))),
        {(p + shift, d): q for part, shift in pairs for (p, d), q in part.distributions.items()},
    )


def in_order(listed: Listed, rows: int) -> Nodes:
    """Return listed nodes of B rows in order.

    Nodes of one path become one node, with all of their draws and the largest of their scores.
    """
    numbers, found = depth_first(listed.tokens.tolist(), listed.parents.tolist(), listed.scores.tolist(), rows)
    tokens, parents, depths, scores = map(np.array, zip(*found, strict=True))
    draws = listed.draws._replace(nodes=numbers[listed.draws.nodes])
    order = np.lexsort((draws.orders, draws.drafts, draws.nodes))
    distributions: dict[tuple[int, int], np.ndarray] = {}
    for (parent, draft), distribution in listed.distributions.items():
        distributions.setdefault((int(numbers[parent]), draft), distribution)
    return Nodes(
        np.append(np.flatnonzero(parents < 0), len(found)),
        *(tokens, parents, depths, scores),
        Draws(*(column[order] for column in draws)),
        distributions,
    )


def ancestors(nodes: Nodes) -> np.ndarray:
    """Return the (B, T, T) bool mask: [b, i, j] where node j of row b is node i or one of its ancestors.

    T is the size of the largest tree.  Padding sees itself only.
    """
    width = int(nodes.sizes.max())
    columns = np.arange(width)
    ends = np.tile(columns + 1, (len(nodes.sizes), 1))  # of each node's subtree, which lies together
    ends[nodes.rows, nodes.columns] = nodes.columns + nodes.subtrees
    return (columns <= columns[:, None]) & (columns[:, None] < ends[:, None])


def depths_of(parents: Numbers) -> Numbers:
    """Return the depth of every node."""
    above = np.where(parents < 0, np.arange(len(parents)), parents)
    depths = (parents >= 0).astype(np.int64)
    while (more := depths[above]).any():  # of 1, 2, 4, ... levels up
        depths += more
        above = above[above]
    return depths


def depth_first(
    tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], rows: int
) -> tuple[Numbers, list[tuple[int, int, int, float]]]:
    """Order listed nodes of B rows: row by row, depth first, siblings by score descending, then token.

    Nodes of one path count as one, whose score is the largest of theirs.  In lists, for trees have few nodes.

    Args:
        tokens, parents, scores: of S listed nodes: see `Listed`.
        rows: B.

    Returns:
        numbers: (S,) of the node that each listed one becomes; -1 if no root leads to it.
        found: token, parent, depth and score of each node.
    """
    roots: list[int] = []
    below: list[list[int]] = [[] for _ in tokens]
    for node, parent in enumerate(parents):
        (roots if parent < 0 else below[parent]).append(node)
    numbers = [-1] * len(tokens)
    found: list[tuple[int, int, int, float]] = []
    waiting = [(roots[row::rows], -1, 0, 0.0) for row in reversed(range(rows))]
    while waiting:
        same, parent, depth, score = waiting.pop()
        number = len(found)
        found.append((tokens[same[0]], parent, depth, score))
        children: dict[int, list[int]] = {}
        for node in same:
            numbers[node] = number
            for child in below[node]:
                children.setdefault(tokens[child], []).append(child)
        ranked = [(max([scores[child] for child in each]), -token, each) for token, each in children.items()]
        waiting += [(each, number, depth + 1, best) for best, _, each in sorted(ranked)]
    return np.array(numbers, np.int64), found


def _from_first(values: Numbers, groups: Numbers) -> Numbers:
    """Return ascending values less the first value of their group; members of a group lie together."""
    first = np.ones(len(values), bool)
    first[1:] = groups[1:] != groups[:-1]
    return values - np.maximum.accumulate(np.where(first, values, 0))


def _inverse(order: Numbers, values: Numbers) -> Numbers:
    """Return sorted values as they were before `order` sorted them."""
    found = np.empty_like(values)
    found[order] = values
    return found
