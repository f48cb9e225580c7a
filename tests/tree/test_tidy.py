"""The tidy layout: the aesthetics of Reingold and Tilford, on every tree; and large trees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, token_trees

from specinfer.tree import Draw, TokenTree
from specinfer.tree.tidy import tidy

EPSILON = 1e-9


def of(parents: list[int]) -> TokenTree:
    """The tree with these parents, in depth-first order; siblings are likeliest first."""
    count, seen = len(parents), dict.fromkeys(range(-1, len(parents)), 0)
    draws: list[tuple[Draw, ...]] = [()]
    for parent in parents[1:]:
        draws.append((Draw(0, seen[parent]),))
        seen[parent] += 1
    return TokenTree(np.arange(count), np.array(parents), np.zeros(count), tuple(draws))


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    """Parents in depth-first order, up to 60 nodes: each node hangs below one on the previous node's path."""
    parents, path = [-1], [0]
    for node in range(1, draw(st.integers(1, 60))):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(node)
    return parents


@PROPERTY
@given(token_trees() | shapes().map(of))
def test_tidy_trees(tree: TokenTree) -> None:
    """One line a depth, nodes of one depth at least 1 apart and in order, parents centred, starting at 0."""
    x, y = tidy(tree.parents)
    assert x.shape == y.shape == (len(tree),)
    assert y.tolist() == tree.depths.tolist()
    assert x.min() == 0
    for depth in range(tree.depth + 1):
        level = x[tree.depths == depth]  # in depth-first order: rising means that no edges cross
        assert (np.diff(level) >= 1 - EPSILON).all()
    for node in range(len(tree)):
        if children := tree.children(node):
            assert x[node] == pytest.approx((x[children[0]] + x[children[-1]]) / 2)


@PROPERTY
@given(shapes())
def test_a_subtree_is_drawn_the_same_wherever_it_stands(parents: list[int]) -> None:
    """Below a sibling, a node of its own and alone: the same shape."""
    alone, _ = tidy(of(parents).parents)
    count = len(parents)
    twice = [-1, 0, *(parent + 1 for parent in parents[1:]), 0, *(parent + 1 + count for parent in parents[1:])]
    x, _ = tidy(of(twice).parents)
    for first in (1, 1 + count):
        np.testing.assert_allclose(x[first : first + count] - x[first], alone - alone[0], atol=EPSILON)


@PROPERTY
@given(shapes(), st.data())
def test_a_bonus_is_the_last_child_of_its_parent(parents: list[int], data: st.DataObject) -> None:
    tree = of(parents)
    end = data.draw(st.integers(0, len(tree) - 1))
    x, y = tidy([*tree.parents, end])
    assert len(x) == len(tree) + 1
    assert y[-1] == tree.depths[end] + 1
    others = [x[node] for node in tree.children(end)]
    assert all(x[-1] >= other + 1 - EPSILON for other in others)
    assert x[end] == pytest.approx(((others or [x[-1]])[0] + x[-1]) / 2)


def test_narrow() -> None:
    """A chain has no width, siblings are 1 apart, and a complete binary tree is as wide as its leaves."""
    assert tidy(of([-1, 0, 1, 2]).parents)[0].tolist() == [0, 0, 0, 0]
    assert tidy(of([-1, 0, 0, 0]).parents)[0].tolist() == [1, 0, 1, 2]
    assert tidy(of([-1, 0, 1, 1, 0, 4, 4]).parents)[0].tolist() == [1.5, 0.5, 0, 1, 2.5, 2, 3]
    x, _ = tidy(of([-1, 0, 1, 1, 1, 0, 0]).parents)
    assert np.diff(x[[1, 5, 6]]).tolist() == [1, 1]  # a wide level does not push away what ends above it


def test_room_is_shared_out() -> None:
    """Leaves between two wide subtrees stand evenly, not beside the first of them."""
    wide = [-1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 9, 9, 9, 9, 9]
    x, _ = tidy(of(wide).parents)
    np.testing.assert_allclose(np.diff(x[[1, 7, 8, 9]]), 5 / 3)


@pytest.mark.parametrize("parents", [list(range(-1, 4999)), [-1] + [0] * 4999], ids=["deep", "wide"])
def test_large(parents: list[int]) -> None:
    """Thousands of nodes: nothing recurses."""
    x, y = tidy(of(parents).parents)
    assert (x.max(), y.max()) == ((0, 4999) if parents[-1] else (4998, 1))
