"""Token trees as arrays: the trees of a whole batch side by side, built, merged and cut all at once.

This module knows numbers and who is whose parent.  It makes no objects for nodes or rows: work is done on all nodes of
all rows together.  `TokenTree` is one row of it, for those who look.

There is one convention for parents wherever nodes are numbered: a root comes before its nodes, and has parent -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Distributions = Mapping[tuple[int, int], np.ndarray]  # (node, draft) -> (V,) float64


class Draws(NamedTuple):
    """Who drew which node: K draws; a node may have several."""

    nodes: Numbers  # (K,)
    drafts: Numbers  # (K,)
    orders: Numbers  # (K,) ascending in drawing order among those of one draft under one parent

    def of(self, keep: np.ndarray, place: Numbers) -> Draws:
        """Return the draws of the nodes that are kept, which have moved."""
        mine = keep[self.nodes]
        return Draws(place[self.nodes[mine]], self.drafts[mine], self.orders[mine])


class Listed(NamedTuple):
    """Nodes of B trees in any order, but the B roots first, in the order of their rows; a path may be listed twice."""

    tokens: Numbers  # (S,)
    parents: Numbers  # (S,); -1 of the roots
    scores: NDArray[np.float64]  # (S,) log-probability of the path; 0 at the roots
    draws: Draws
    distributions: Distributions
    distinct: bool = False  # no path is listed twice


class Nodes:
    """B trees of N nodes in all, row after row, each in depth-first pre-order; siblings by score descending, then id.

    Attributes:
        starts: (B + 1,) where each row's root is, then N.
        tokens, parents, depths, scores: (N,); numbers of nodes count through all rows.
        draws, distributions: as `Listed`; draws by node, then draft, then order.
    """

    def __init__(
        self,
        starts: Numbers,
        tokens: Numbers,
        parents: Numbers,
        depths: Numbers,
        scores: NDArray[np.float64],
        draws: Draws,
        distributions: Distributions,
    ) -> None:
        self.starts, self.draws, self.distributions = starts, draws, distributions
        self.tokens, self.parents, self.depths, self.scores = tokens, parents, depths, scores
        for array in (tokens, parents, depths, scores, *draws):
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
    def places(self) -> Numbers:
        """The number of each node in its own tree, (N,); the root's is 0."""
        return np.arange(len(self)) - self.starts[self.rows]

    @cached_property
    def proposers(self) -> Numbers:
        """The drafts that drew each node, (N,) bit masks: bit d for draft d."""
        masks = np.zeros(len(self), np.int64)
        np.bitwise_or.at(masks, self.draws.nodes, 1 << self.draws.drafts)
        return masks

    @cached_property
    def ranks(self) -> Numbers:
        """The place of each draw among those of its draft under its parent, (K,): 0, 1, ..."""
        families, drafts = self.parents[self.draws.nodes], self.draws.drafts
        order = np.lexsort((self.draws.orders, drafts, families))
        families, drafts = families[order], drafts[order]
        first = np.ones(len(order), bool)
        first[1:] = (families[1:] != families[:-1]) | (drafts[1:] != drafts[:-1])
        every = np.arange(len(order))
        return _inverse(order, every - np.maximum.accumulate(np.where(first, every, 0)))

    def row(self, row: int) -> Nodes:
        """Return one row alone."""
        if len(self.sizes) == 1:
            return self
        start, end = self.starts[row : row + 2].tolist()
        first, last = self._cuts[row : row + 2]
        nodes, drafts, orders = (column[first:last].copy() for column in self.draws)
        own = slice(start, end)
        alone = Nodes(
            np.array([0, end - start]),
            self.tokens[own].copy(),  # a row may be kept for long: not with the others' memory
            np.maximum(self.parents[own] - start, -1),
            self.depths[own].copy(),
            self.scores[own].copy(),
            Draws(nodes - start, drafts, orders),
            self._distributions_by_row[row] if self.distributions else {},
        )
        alone.proposers = self.proposers[own].copy()
        return alone

    @cached_property
    def _distributions_by_row(self) -> list[dict[tuple[int, int], np.ndarray]]:
        """Every row's distributions, by its own nodes."""
        found: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in self.sizes]
        for (parent, draft), distribution in self.distributions.items():
            found[self.rows[parent]][int(self.places[parent]), draft] = distribution
        return found

    @cached_property
    def _cuts(self) -> list[int]:
        """Where each row's draws begin."""
        return np.searchsorted(self.draws.nodes, self.starts).tolist()

    def listed(self) -> Listed:
        """Return the nodes with the roots first."""
        drafted = self.depths > 0
        place = np.where(drafted, np.cumsum(drafted) - 1 + len(self.sizes), self.rows)
        order = np.concatenate((self.starts[:-1], np.flatnonzero(drafted)))
        parents = self.parents[order]
        return Listed(
            self.tokens[order],
            np.where(parents < 0, -1, place[parents]),
            self.scores[order],
            self.draws._replace(nodes=place[self.draws.nodes]),
            {(int(place[p]), draft): distribution for (p, draft), distribution in self.distributions.items()},
            distinct=True,
        )

    def pruned(self, depths: Sequence[int]) -> Nodes:
        """Return the trees without the nodes deeper than a depth, one for each row."""
        return self._kept(self.depths <= np.maximum(depths, 0)[self.rows])

    def best(self, count: int, worth: np.ndarray | Sequence[float]) -> Nodes:
        """Return, of each row, the `count` drafted nodes that are worth most; equals are kept in node order.

        Args:
            count: drafted nodes of a row at most.
            worth: (N,); a node that is worth more than its parent counts as its parent does, so ancestors are kept; the
                roots are always.
        """
        least = np.array(worth, np.float64)
        least[self.starts[:-1]] = np.inf
        for depth in range(2, self.depths.max() + 1):
            level = np.flatnonzero(self.depths == depth)
            least[level] = np.minimum(least[level], least[self.parents[level]])
        order = np.lexsort((-least, self.rows))
        return self._kept(_inverse(order, self.places) <= max(count, 0))

    def without_distributions(self) -> Nodes:
        """Return the trees as records."""
        return Nodes(self.starts, self.tokens, self.parents, self.depths, self.scores, self.draws, {})

    def _kept(self, keep: np.ndarray) -> Nodes:
        """Return the nodes that are kept, with their ancestors among them."""
        if keep.all():
            return self
        place = np.cumsum(keep) - 1
        parents = self.parents[keep]
        draws = self.draws.of(keep, place)
        parents = np.where(parents < 0, -1, place[parents])
        used = (
            set(zip(parents[draws.nodes].tolist(), draws.drafts.tolist(), strict=True)) if self.distributions else set()
        )
        moved = {
            (int(place[p]), draft): distribution for (p, draft), distribution in self.distributions.items() if keep[p]
        }
        return Nodes(
            np.append(place[self.starts[:-1]], len(parents)),
            self.tokens[keep],
            parents,
            self.depths[keep],
            self.scores[keep],
            draws,
            {key: distribution for key, distribution in moved.items() if key in used},
        )


def planted(listed: Listed) -> Nodes:
    """Put listed nodes in order; those with the same path become one, with all their draws and the largest score."""
    node, chosen = _united(listed)  # of each listed node, what it becomes; of each of those, one that is listed
    parents = np.append(node, -1)[listed.parents[chosen]]
    tokens, depths, scores = listed.tokens[chosen], _depths(parents), listed.scores[chosen]
    if not listed.distinct:
        np.maximum.at(scores, node, listed.scores)
    places = _depth_first(parents, depths, tokens, scores)
    order = _inverse(places, np.arange(len(places)))
    draws = listed.draws._replace(nodes=places[node[listed.draws.nodes]])
    turns = np.lexsort((draws.orders, draws.drafts, draws.nodes))
    distributions: dict[tuple[int, int], np.ndarray] = {}
    for (parent, draft), distribution in listed.distributions.items():
        distributions.setdefault((int(places[node[parent]]), draft), distribution)
    return Nodes(
        np.append(places[parents < 0], len(places)),
        tokens[order],
        np.append(places, -1)[parents[order]],
        depths[order],
        scores[order],
        Draws(*(column[turns] for column in draws)),
        distributions,
    )


def bare(roots: Sequence[int]) -> Nodes:
    """Return trees that draft nothing."""
    count = len(roots)
    none, zeros = np.zeros(0, np.int64), np.zeros(count, np.int64)
    draws = Draws(none, none, none)
    return Nodes(np.arange(count + 1), np.array(roots, np.int64), zeros - 1, zeros, np.zeros(count), draws, {})


def joined(parts: Sequence[Listed], rows: int) -> Listed:
    """Return all listed nodes of trees that grow from the same roots, B rows of them."""
    first, *others = parts
    if not others:
        return first
    shifts = np.cumsum([0, *(len(part.tokens) - rows for part in parts)]).tolist()
    moved = [(part, shift) for part, shift in zip(parts, shifts, strict=False)]

    def place(numbers: Numbers, shift: int) -> Numbers:
        return np.where(numbers < rows, numbers, numbers + shift)

    draws = [part.draws._replace(nodes=part.draws.nodes + shift) for part, shift in moved]
    return Listed(
        np.concatenate((first.tokens, *(part.tokens[rows:] for part in others))),
        np.concatenate((first.parents, *(place(part.parents[rows:], shift) for part, shift in moved[1:]))),
        np.concatenate((first.scores, *(part.scores[rows:] for part in others))),
        Draws(*map(np.concatenate, zip(*draws, strict=True))),
        {
            (p if p < rows else p + shift, d): distribution
            for part, shift in moved
            for (p, d), distribution in part.distributions.items()
        },
    )


def side_by_side(rows: Sequence[Nodes]) -> Nodes:
    """Return the trees of several batches as those of one."""
    if len(rows) == 1:
        return rows[0]
    shifts = np.cumsum([0, *map(len, rows)])
    pairs = list(zip(rows, shifts.tolist(), strict=False))
    draws = [own.draws._replace(nodes=own.draws.nodes + shift) for own, shift in pairs]
    return Nodes(
        np.append(np.concatenate([own.starts[:-1] + shift for own, shift in pairs]), shifts[-1]),
        np.concatenate([own.tokens for own in rows]),
        np.concatenate([np.where(own.parents < 0, -1, own.parents + shift) for own, shift in pairs]),
        np.concatenate([own.depths for own in rows]),
        np.concatenate([own.scores for own in rows]),
        Draws(*(np.concatenate(column) for column in zip(*draws, strict=True))),
        {
            (p + shift, draft): distribution
            for own, shift in pairs
            for (p, draft), distribution in own.distributions.items()
        },
    )


def ancestors(nodes: Nodes) -> np.ndarray:
    """Return the (B, T, T) bool mask, T = the largest tree: [b, i, j] where node j of row b is i or above it.

    Padding sees itself only.
    """
    width = int(nodes.sizes.max())
    visible = np.broadcast_to(np.eye(width, dtype=bool), (len(nodes.sizes), width, width)).copy()
    rows, places, above = nodes.rows, nodes.places, nodes.parents
    for _ in range(int(nodes.depths.max())):
        below = above >= 0
        rows, places, above = rows[below], places[below], above[below]
        visible[rows, places, nodes.places[above]] = True
        above = nodes.parents[above]
    return visible


def _depths(parents: Numbers) -> Numbers:
    """Return every node's depth."""
    above = np.where(parents < 0, np.arange(len(parents)), parents)
    depths = (parents >= 0).astype(np.int64)
    while (more := depths[above]).any():  # of 1, 2, 4, ... levels up
        depths += more
        above = above[above]
    return depths


def _united(listed: Listed) -> tuple[Numbers, Numbers]:
    """Return the node that each listed one becomes, the roots first, and for each node one that is listed.

    Paths are told apart by their last 1, 2, 4, ... tokens: prefix doubling, as for suffix arrays (Manber and Myers,
    "Suffix Arrays", 1993), from the leaves up.
    """
    every = np.arange(len(listed.parents))
    if listed.distinct:
        return every, every
    roots = listed.parents < 0
    above = np.where(roots, every, listed.parents)
    names = np.where(roots, every, listed.tokens + len(every))  # of what was seen of each path; roots are no tokens
    while True:
        names = np.unique(names, return_inverse=True)[1]  # small again
        if roots[above].all():
            break
        names = names * len(every) + names[above]
        above = above[above]
    _, chosen, names = np.unique(names * len(every) + names[above], return_index=True, return_inverse=True)
    order = np.argsort(chosen)  # as listed: the roots first
    return _inverse(order, np.arange(len(order)))[names], chosen[order]


def _depth_first(parents: Numbers, depths: Numbers, tokens: Numbers, scores: NDArray[np.float64]) -> Numbers:
    """Return each node's place: row by row, depth first, siblings by score descending, then token."""
    rows = np.count_nonzero(parents < 0)
    sizes = np.ones(len(parents), np.int64)
    by_depth = np.argsort(depths, kind="stable")
    ends = np.cumsum(np.bincount(depths)).tolist()
    for first, last in zip(ends[-2::-1], ends[:0:-1], strict=True):  # the deepest level first
        level = by_depth[first:last]
        np.add.at(sizes, parents[level], sizes[level])
    order = np.lexsort((tokens, -scores, parents))[rows:]  # families, one after the other; roots come first
    before = np.cumsum(sizes[order]) - sizes[order]
    family = parents[order]
    first = np.ones(len(order), bool)
    first[1:] = family[1:] != family[:-1]
    places = np.zeros(len(parents), np.int64)  # from the parent's
    places[order] = before - np.maximum.accumulate(np.where(first, before, 0)) + 1
    places[:rows] = np.cumsum(sizes[:rows]) - sizes[:rows]
    above = np.where(parents < 0, np.arange(len(parents)), parents)
    steps = np.where(parents < 0, 0, places)
    while (above >= rows).any():  # sums of 1, 2, 4, ... levels
        steps += np.where(above >= rows, steps[above], 0)
        above = above[above]
    return np.where(parents < 0, places, steps + places[above])


def _inverse(order: Numbers, values: Numbers) -> Numbers:
    """Return the values of what was put in this order, as it was before."""
    found = np.empty_like(values)
    found[order] = values
    return found
