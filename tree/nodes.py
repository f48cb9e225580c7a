"""Token trees as arrays: the trees of a whole batch side by side, built, merged and cut all at once.

This module knows numbers and who is whose parent.  It makes no objects for nodes or rows: work is done on all nodes of
all rows together, a few array operations a level, so that a step of many rows costs little more than one of a single
row.  `TokenTree` is one row of it, for those who look.

There is one convention for parents, here and wherever nodes are numbered: the root comes first and has parent -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Laws = Mapping[tuple[int, int], np.ndarray]  # (node, draft) -> (V,) float64


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
    laws: Laws = MappingProxyType({})
    distinct: bool = False  # no path is listed twice


class Nodes:
    """B trees of N nodes in all, row after row, each in depth-first pre-order; siblings by score descending, then id.

    Attributes:
        starts: (B + 1,) where each row's root is, then N.
        tokens, parents, depths, scores: (N,); numbers of nodes count through all rows.
        draws, laws: as `Listed`; draws by node, then draft, then order.
    """

    def __init__(
        self,
        starts: Numbers,
        tokens: Numbers,
        parents: Numbers,
        depths: Numbers,
        scores: NDArray[np.float64],
        draws: Draws,
        laws: Laws,
    ) -> None:
        self.starts, self.draws, self.laws = starts, draws, laws
        self.tokens, self.parents, self.depths, self.scores = tokens, parents, depths, scores
        for array in (tokens, parents, depths, scores):
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
        start, end = self.starts[row : row + 2].tolist()
        first, last = self._cuts[row : row + 2]
        nodes, drafts, orders = (column[first:last] for column in self.draws)
        laws = {(p - start, draft): law for (p, draft), law in self.laws.items() if start <= p < end}
        own = slice(start, end)
        alone = Nodes(
            np.array([0, end - start]),
            self.tokens[own],
            np.maximum(self.parents[own] - start, -1),
            self.depths[own],
            self.scores[own],
            Draws(nodes - start, drafts, orders),
            laws,
        )
        alone.proposers = self.proposers[own]
        return alone

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
            {(int(place[p]), draft): law for (p, draft), law in self.laws.items()},
            distinct=True,
        )

    def pruned(self, depths: Sequence[int]) -> Nodes:
        """Return the trees without the nodes deeper than a depth, one for each row."""
        return self._kept(self.depths <= np.maximum(depths, 0)[self.rows])

    def best(self, count: int, worth: NDArray[np.float64]) -> Nodes:
        """Return, of each row, the `count` drafted nodes that are worth most; equals are kept in node order.

        Args:
            count: drafted nodes of a row at most.
            worth: (N,); a node that is worth more than its parent counts as its parent does, so ancestors are kept.
        """
        if count >= self.sizes.max() - 1:
            return self
        least = np.array(worth, np.float64)
        least[self.starts[:-1]] = np.inf
        for depth in range(2, self.depths.max() + 1):
            level = np.flatnonzero(self.depths == depth)
            least[level] = np.minimum(least[level], least[self.parents[level]])
        order = np.lexsort((-least, self.rows))
        return self._kept(_inverse(order, self.places) <= count)

    def without_laws(self) -> Nodes:
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
        used = set(zip(parents[draws.nodes].tolist(), draws.drafts.tolist(), strict=True)) if self.laws else set()
        moved = {(int(place[p]), draft): law for (p, draft), law in self.laws.items() if keep[p]}
        return Nodes(
            np.append(place[self.starts[:-1]], len(parents)),
            self.tokens[keep],
            parents,
            self.depths[keep],
            self.scores[keep],
            draws,
            {key: law for key, law in moved.items() if key in used},
        )


def planted(listed: Listed) -> Nodes:
    """Put listed nodes in order; those with the same path become one, with all their draws and the largest score."""
    lines, depths = _lines(listed.parents)
    every = np.arange(len(depths))
    node, chosen, scores = (every, every, listed.scores) if listed.distinct else _united(lines, listed)
    tokens = listed.tokens[chosen]
    order = _depth_first(lines, node, chosen, tokens, scores)
    place = _inverse(order, np.arange(len(order)))[node]  # of each listed node, its final number
    chosen = chosen[order]
    parents = listed.parents[chosen]
    draws = listed.draws._replace(nodes=place[listed.draws.nodes])
    turns = np.lexsort((draws.orders, draws.drafts, draws.nodes))
    laws: dict[tuple[int, int], np.ndarray] = {}
    for (parent, draft), law in listed.laws.items():
        laws.setdefault((int(place[parent]), draft), law)
    return Nodes(
        np.append(place[: np.count_nonzero(listed.parents < 0)], len(chosen)),
        tokens[order],
        np.where(parents < 0, -1, place[parents]),
        depths[chosen],
        scores[order],
        Draws(*(column[turns] for column in draws)),
        laws,
    )


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
        {(p if p < rows else p + shift, d): law for part, shift in moved for (p, d), law in part.laws.items()},
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
        {(p + shift, draft): law for own, shift in pairs for (p, draft), law in own.laws.items()},
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


def _lines(parents: Numbers) -> tuple[np.ndarray, Numbers]:
    """Return (L + 1, S) every listed node's ancestor at each depth, itself at its own, -1 below; and the depths."""
    above = np.append(parents, -1)  # of nobody, nobody
    ups = [np.arange(len(parents))]
    while (up := above[ups[-1]]).max() >= 0:
        ups.append(up)
    climbed = np.stack(ups)
    depths = (climbed >= 0).sum(0) - 1
    steps = depths - np.arange(len(ups))[:, None]
    return np.where(steps >= 0, np.take_along_axis(climbed, np.maximum(steps, 0), 0), -1), depths


def _united(lines: np.ndarray, listed: Listed) -> tuple[Numbers, Numbers, NDArray[np.float64]]:
    """Return the node that each listed one becomes, one listed for each node, and each node's score."""
    paths = np.append(listed.tokens, -1)[lines]
    paths[0] = lines[0]  # rows apart
    order = np.lexsort(paths[::-1])
    paths = paths[:, order]
    first = np.append(True, (paths[:, 1:] != paths[:, :-1]).any(0))
    scores = np.maximum.reduceat(listed.scores[order], np.flatnonzero(first))
    return _inverse(order, np.cumsum(first) - 1), order[first], scores


def _depth_first(
    lines: np.ndarray, node: Numbers, chosen: Numbers, tokens: Numbers, scores: NDArray[np.float64]
) -> Numbers:
    """Return nodes row by row, depth first, siblings by score descending, then token."""
    ranks = _inverse(np.lexsort((tokens, -scores)), np.arange(len(tokens)))
    lines = lines[:, chosen]
    paths = np.append(ranks, -1)[np.append(node, -1)[lines]]
    paths[0] = lines[0]
    return np.lexsort(paths[::-1])


def _inverse(order: Numbers, values: Numbers) -> Numbers:
    """Return the values of what was put in this order, as it was before."""
    found = np.empty_like(values)
    found[order] = values
    return found
