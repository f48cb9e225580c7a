"""Where to draw the nodes of a token tree: the tidy layout.

This module knows parents and children.  It does not know text, pixels or plotting libraries.

The aesthetics are those of Reingold and Tilford ("Tidier Drawings of Trees", 1981): nodes of one depth on one line,
siblings in order, a parent centred above its children, a subtree drawn the same wherever it stands, and narrow.  As in
Buchheim, Juenger and Leipert ("Improving Walker's Algorithm to Run in Linear Time", 2002), the room that a wide
subtree needs is shared out evenly among the smaller ones beside it, and the time is linear in the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def tidy(parents: Iterable[int], bonus: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return where each node stands: x across, siblings at rising x, and y down, its depth.

    Nodes of one depth are at least 1 apart, edges do not cross, and the smallest x is 0.  Swap x and y for a tree that
    grows to the right.

    Args:
        parents: (N,) of nodes in depth-first order; the first one, the root, has -1.
        bonus: a node below which one more is placed, as its last child: the target's own token, which is in no tree.

    Returns:
        x and y, float64 (N,) each; (N + 1,) with a bonus, which comes last.
    """
    parents = [*map(int, parents), *([] if bonus is None else [bonus])]
    families: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        families[parent].append(node)
    offsets = np.zeros(len(parents))  # from the parent
    outlines: dict[int, _Outline] = {}
    for node in reversed(range(len(parents))):  # children before their parents
        places, outlines[node] = _side_by_side([outlines.pop(child) for child in families[node]])
        offsets[families[node]] = places
    x, y = offsets, np.zeros(len(parents))
    for node, parent in enumerate(parents[1:], start=1):
        x[node] += x[parent]
        y[node] = y[parent] + 1
    return x - x.min(), y


class _Side:
    """The x of one side of a subtree, by level; all move together in constant time."""

    def __init__(self) -> None:
        self.levels: list[float] = []  # deepest first, less `base`
        self.base = 0.0

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, level: int) -> float:
        return self.levels[-1 - level] + self.base

    def cover(self, other: _Side) -> _Side:
        """Return a side that is this one as far down as it goes, and the other below; both are used up."""
        if len(self) >= len(other):
            return self
        for level in range(len(self)):
            other.levels[-1 - level] = self[level] - other.base
        return other

    def crown(self) -> None:
        """Put a level on top, at 0."""
        self.levels.append(-self.base)


class _Outline:
    """The left and the right side of a subtree, or of neighbouring ones, seen from a point that the user chooses."""

    def __init__(self, left: _Side, right: _Side) -> None:
        self.left, self.right = left, right

    def move(self, distance: float) -> None:
        self.left.base += distance
        self.right.base += distance


def _side_by_side(subtrees: list[_Outline]) -> tuple[list[float], _Outline]:
    """Place sibling subtrees next to each other; return each one's x from the parent, and the parent's outline.

    A subtree is held up at some level by an earlier one; those between the two are not as deep, hence on neither side
    of the outline from then on, and may move later.
    """
    places: list[float] = []
    bends = np.zeros((2, len(subtrees) + 1))  # what moves later: changes of its slope, and drops back to 0
    forest = _Outline(_Side(), _Side())
    seen: list[int] = []  # the subtrees that make up the forest's right side, the deepest first
    heights = [len(subtree.left) for subtree in subtrees]
    for new, subtree in enumerate(subtrees):
        places.append(0.0)
        holder = len(seen) - 1
        for level in range(min(len(forest.right), heights[new])):
            while heights[seen[holder]] <= level:
                holder -= 1
            gap = forest.right[level] + 1 - subtree.left[level]
            if gap > 0:
                subtree.move(gap)
                places[new] += gap
                old = seen[holder]
                slope = gap / (new - old)
                bends[:, new] += -slope, gap
                bends[0, old] += slope
        while seen and heights[seen[-1]] <= heights[new]:
            seen.pop()
        seen.append(new)
        forest = _Outline(forest.left.cover(subtree.left), subtree.right.cover(forest.right))
    _spread(places, bends)
    centre = (places[0] + places[-1]) / 2 if places else 0.0
    forest.move(-centre)
    forest.left.crown()
    forest.right.crown()
    return [place - centre for place in places], forest


def _spread(places: list[float], bends: np.ndarray) -> None:
    """Move each place by what was put off."""
    slope = distance = 0.0
    for i, (bend, drop) in enumerate(bends.T[: len(places)].tolist()):
        distance += slope - drop
        places[i] += distance
        slope += bend
