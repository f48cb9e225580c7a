"""Where to draw the nodes of a token tree: the tidy layout.

This module knows parents and children.  It does not know text, pixels or plotting libraries.

The aesthetics are those of Reingold and Tilford ("Tidier Drawings of Trees", 1981): nodes of one depth on one line,
siblings in order, a parent centred above its children, a subtree drawn the same wherever it stands, and narrow.  As in
Buchheim, Juenger and Leipert ("Improving Walker's Algorithm to Run in Linear Time", 2002), the space that a wide
subtree needs is shared out evenly among the smaller ones beside it.  The time is linear in nodes times depth.
"""

from collections.abc import Iterable, Sequence

import numpy as np


def tidy(parents: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return where each node stands: x across, siblings at rising x, and y down, its depth.

    Nodes of one depth are at least 1 apart, edges do not cross, and the smallest x is 0.  Swap x and y for a tree that
    grows to the right.

    Args:
        parents: (N,) of nodes that come after their parents, siblings in order; the first one, the root, has -1.

    Returns:
        x and y, float64 (N,) each.
    """
    parents = list(map(int, parents))
    families: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        families[parent].append(node)
    x, y = np.zeros(len(parents)), np.zeros(len(parents))
    outlines: dict[int, np.ndarray] = {}
    for node in reversed(range(len(parents))):  # children before their parents
        x[families[node]], outlines[node] = _side_by_side([outlines.pop(child) for child in families[node]])
    for node, parent in enumerate(parents[1:], start=1):
        x[node] += x[parent]
        y[node] = y[parent] + 1
    return x - x.min(), y


def _side_by_side(subtrees: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Place sibling subtrees next to each other; return each one's x from the parent, and the parent's outline.

    An outline is (2, levels): the x of the left and the right side of a subtree at its levels, seen from its top node.

    A subtree is held up at some level by an earlier one.  Those between the two are not as deep: they are on neither
    side of the outline from then on, and take their share of the move.
    """
    x = np.zeros(len(subtrees))
    forest, holders = np.empty((2, 0)), np.empty(0, int)  # holders: by level, the subtree that is the right side
    for new, outline in enumerate(subtrees):
        shared = min(forest.shape[1], outline.shape[1])
        reached = np.maximum.accumulate([0.0, *(forest[1, :shared] + 1 - outline[0, :shared])])
        moves = np.diff(reached)
        for level in np.flatnonzero(moves):
            between = np.arange(holders[level] + 1, new)
            x[between] += moves[level] * (between - holders[level]) / (new - holders[level])
        x[new] = reached[-1]
        left, right = outline + x[new]
        forest = np.stack((np.append(forest[0], left[shared:]), np.append(right, forest[1, shared:])))
        holders = np.append(np.full(len(right), new), holders[shared:])
    centre = (x[0] + x[-1]) / 2 if len(x) else 0.0
    return x - centre, np.insert(forest - centre, 0, 0.0, axis=1)
