"""Merging: nothing is lost, and neither grouping nor order matters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, token_trees

from specinfer.errors import TreeError
from specinfer.tree import Draw, Kind, TokenTree, merge


def three_trees() -> st.SearchStrategy[tuple[TokenTree, TokenTree, TokenTree]]:
    """Trees of one root and kind, from drafts of their own."""
    return st.sampled_from(list(Kind)).flatmap(
        lambda kind: st.tuples(*(token_trees(kind=kind, drafts=drafts, root=1) for drafts in ((2,), (0, 3), (1,))))
    )


@PROPERTY
@given(three_trees())
def test_merge_is_associative_and_commutative(trees: tuple[TokenTree, ...]) -> None:
    a, b, c = trees
    whole = merge([a, b, c])
    assert merge([merge([a, b]), c]) == whole
    assert merge([a, merge([b, c])]) == whole
    assert merge([c, a, b]) == whole


@PROPERTY
@given(three_trees())
def test_merge_keeps_every_path_draw_and_law(trees: tuple[TokenTree, ...]) -> None:
    def draws(tree: TokenTree) -> set[tuple]:
        return {(*tree.path(node), draw) for node in range(len(tree)) for draw in tree.draws[node]}

    def distributions(tree: TokenTree) -> dict[tuple, bytes]:
        return {
            (*tree.path(node), draft): distribution.tobytes()
            for (node, draft), distribution in tree.distributions.items()
        }

    whole = merge(trees)
    assert draws(whole) == set().union(*map(draws, trees))
    assert distributions(whole) == {
        key: distribution for tree in trees for key, distribution in distributions(tree).items()
    }
    for node in range(len(whole)):
        path = whole.path(node)
        scores = [tree.scores[i] for tree in trees for i in range(len(tree)) if tree.path(i) == path]
        assert whole.scores[node] == max(scores)


@PROPERTY
@given(token_trees())
def test_merge_of_one_tree_is_that_tree(tree: TokenTree) -> None:
    assert merge([tree]) == tree
    assert merge([tree, TokenTree.root_only(int(tree.tokens[0]), tree.kind)]) == tree


def test_equal_tokens_of_two_drafts_are_one_node_with_two_draws() -> None:
    distributions = [np.array([0.5, 0.5]), np.array([0.1, 0.9])]
    one, other = (
        TokenTree.from_nodes(0, [1], [0], [float(np.log(q[1]))], [(Draw(d, 0),)], {(0, d): q}, Kind.IID)
        for d, q in enumerate(distributions)
    )
    tree = merge([other, one])
    assert tree.draws == ((), (Draw(0, 0), Draw(1, 0)))
    assert tree.scores[1] == np.log(0.9)
    assert all(np.array_equal(tree.distributions[0, d], q) for d, q in enumerate(distributions))


def test_what_cannot_be_merged_is_named() -> None:
    tree = TokenTree.from_nodes(0, [1], [0], [-1.0], [(Draw(4, 0),)])
    with pytest.raises(TreeError, match="at least one"):
        merge([])
    with pytest.raises(TreeError, match=r"different tokens, \[0, 2\]"):
        merge([tree, TokenTree.root_only(2)])
    with pytest.raises(TreeError, match="iid, ranked"):
        merge([tree, TokenTree.root_only(0, Kind.IID)])
    with pytest.raises(TreeError, match="draft 4 drew in two trees"):
        merge([tree, tree])
