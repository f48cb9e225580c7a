"""The token tree: what holds for every tree, what is refused, and how it reads."""

import json
import pickle
import random

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, VOCAB, node_lists, token_trees

from specinfer.errors import TreeError
from specinfer.tree import Draw, Kind, TokenTree

ONE = (Draw(0, 0),)
EVEN = np.full(9, 1 / 9)


def small() -> TokenTree:
    """0 ── 1 (token 7) ── 2 (token 8), 3 (token 6);  0 ── 4 (token 5)."""
    return TokenTree(
        tokens=np.array([9, 7, 8, 6, 5]),
        parents=np.array([-1, 0, 1, 1, 0]),
        scores=np.log([1, 0.6, 0.48, 0.06, 0.3]),
        draws=((), ONE, ONE, (Draw(0, 1),), (Draw(0, 1),)),
    )


def test_navigation() -> None:
    tree = small()
    assert (len(tree), tree.num_drafted, tree.depth) == (5, 4, 2)
    assert tree.depths.tolist() == [0, 1, 2, 2, 1]
    assert [tree.children(i) for i in range(5)] == [[1, 4], [2, 3], [], [], []]
    assert (tree.child(1, 6), tree.child(1, 7), tree.child(0, 5)) == (3, None, 4)
    assert tree.ancestors(3) == [0, 1, 3]
    assert tree.ancestors(0) == [0]
    assert tree.path(3) == [7, 6]
    assert tree.paths() == [[7, 8], [7, 6], [5]]
    assert tree.draws_under(1) == [(Draw(0, 0), 2), (Draw(0, 1), 3)]
    assert tree.probability(2) == pytest.approx(0.8)


def test_bare_root() -> None:
    tree = TokenTree.root_only(3, Kind.IID)
    assert (len(tree), tree.num_drafted, tree.depth, tree.kind) == (1, 0, 0, Kind.IID)
    assert tree.paths() == [[]]
    assert tree.ancestor_mask().tolist() == [[True]]
    assert tree == TokenTree.from_nodes(3, [], [], [], [], kind=Kind.IID)


@PROPERTY
@given(token_trees())
def test_invariants(tree: TokenTree) -> None:
    """Pre-order, distinct siblings in canonical order, draws numbered 0, 1, ... for each parent and draft."""
    for node in range(1, len(tree)):
        assert tree.parents[node] < node
        assert tree.parents[node] in tree.ancestors(node - 1)
        assert tree.path(node) == [*tree.path(int(tree.parents[node])), tree.tokens[node]]
        assert tree.depths[node] == len(tree.path(node))
        assert tree.scores[node] <= tree.scores[tree.parents[node]]
    for node in range(len(tree)):
        keys = [(-tree.scores[c], tree.tokens[c]) for c in tree.children(node)]
        assert keys == sorted(keys)
        assert len({token for _, token in keys}) == len(keys)
        drawn = [draw for draw, _ in tree.draws_under(node)]
        for draft in {draw.draft for draw in drawn}:
            assert [d.order for d in drawn if d.draft == draft] == list(range(sum(d.draft == draft for d in drawn)))


@PROPERTY
@given(token_trees())
def test_ancestor_mask_is_the_transitive_closure(tree: TokenTree) -> None:
    graph = networkx.transitive_closure(tree.to_networkx(), reflexive=True)
    assert np.array_equal(tree.ancestor_mask(), networkx.to_numpy_array(graph, nodelist=range(len(tree))).T > 0)


@PROPERTY
@given(token_trees(drafts=(0, 3)))
def test_dict_round_trip_is_exact_through_json(tree: TokenTree) -> None:
    assert TokenTree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    assert pickle.loads(pickle.dumps(tree)) == tree


@PROPERTY
@given(node_lists(kind=Kind.RANKED), st.randoms(use_true_random=False))
def test_from_nodes_accepts_any_order(nodes: dict, chance: random.Random) -> None:
    """Shuffled nodes give the same paths and scores (and the same draws, up to their numbers)."""
    order = list(range(len(nodes["tokens"])))
    chance.shuffle(order)
    place = {old + 1: new + 1 for new, old in enumerate(order)} | {0: 0}
    shuffled = {name: [nodes[name][i] for i in order] for name in ("tokens", "scores", "draws")}
    shuffled["parents"] = [place[nodes["parents"][i]] for i in order]
    one, other = TokenTree.from_nodes(**nodes), TokenTree.from_nodes(**(nodes | shuffled))
    assert one.to_dict() | {"draws": 0} == other.to_dict() | {"draws": 0}
    assert [len(draws) for draws in one.draws] == [len(draws) for draws in other.draws]


@PROPERTY
@given(token_trees(), st.integers(0, 4))
def test_pruned_keeps_what_is_not_deeper(tree: TokenTree, depth: int) -> None:
    pruned = tree.pruned(depth)
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    assert [pruned.path(i) for i in range(len(pruned))] == [tree.path(node) for node in kept]
    assert pruned.draws == tuple(tree.draws[node] for node in kept)
    assert pruned.pruned(depth) == pruned


@PROPERTY
@given(token_trees(kind=Kind.RANKED, drafts=(0, 1)), st.integers(0, 12))
def test_best_keeps_the_likeliest_paths(tree: TokenTree, count: int) -> None:
    """Equals in node order; draws of the kept are numbered anew."""
    best = tree.best(count, tree.scores)
    ranked = sorted(range(1, len(tree)), key=lambda node: (-min(tree.scores[tree.ancestors(node)]), node))
    assert [best.path(i) for i in range(len(best))] == [tree.path(node) for node in sorted([0, *ranked[:count]])]
    assert best.best(count, best.scores) == best


def test_best_of_a_sampled_tree_is_refused() -> None:
    tree = TokenTree.from_nodes(1, [4, 2], [0, 0], [-1.0, -2.0], [[Draw(0, 0)], [Draw(0, 1)]], kind=Kind.IID)
    with pytest.raises(TreeError, match="verified whole"):
        tree.best(1, tree.scores)
    assert tree.best(2, tree.scores) == tree


def test_proposers_are_bit_masks() -> None:
    tree = TokenTree.from_nodes(1, [4, 2], [0, 0], [-1.0, -2.0], [[Draw(0, 0), Draw(2, 0)], [Draw(0, 1)]])
    assert tree.proposers == [0, 0b101, 0b001]


def test_draws_under_a_node_drawn_twice_come_one_frontier_entry_after_the_other() -> None:
    """Token 4 was drawn twice, each time followed by two draws of its own: four draws under one node."""
    distribution = np.full(VOCAB, 1 / VOCAB)
    first, second = (Draw(0, 0),), (Draw(0, 1),)
    tree = TokenTree.from_nodes(
        root=1,
        tokens=[4, 4, 2, 3, 5, 2],
        parents=[0, 0, 1, 1, 2, 2],
        scores=[-1, -1, -2, -2, -2, -2],
        draws=[first, second, first, second, first, second],
        distributions={(0, 0): distribution, (1, 0): distribution, (2, 0): distribution},
        kind=Kind.IID,
    )
    assert tree.tokens.tolist() == [1, 4, 2, 3, 5]
    assert tree.draws == (
        (),
        (Draw(0, 0), Draw(0, 1)),
        (Draw(0, 0), Draw(0, 3)),
        (Draw(0, 1),),
        (Draw(0, 2),),
    )
    assert tree.distributions.keys() == {(0, 0), (1, 0)}


def test_arrays_are_read_only_and_the_callers_stay_writable() -> None:
    tokens = np.array([9, 7])
    tree = TokenTree(tokens, np.array([-1, 0]), np.array([0.0, -1.0]), ((), ONE))
    tokens[1] = 3
    assert tree.tokens[1] == 7
    for array in (tree.tokens, tree.parents, tree.scores, tree.depths):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        tree.tokens = tokens  # type: ignore[misc]


def test_equality_and_hash() -> None:
    tree = small()
    assert tree == small()
    assert tree != small().pruned(1)
    assert tree != "tree"
    with pytest.raises(TypeError, match="unhashable"):
        hash(tree)


def test_without_laws_is_a_light_record() -> None:
    distribution = np.array([0.5, 0.5])
    tree = TokenTree.from_nodes(0, [1], [0], [-0.5], [ONE], {(0, 0): distribution}, Kind.IID)
    record = tree.without_distributions()
    assert not record.distributions
    assert record.kind is Kind.IID
    assert record.draws == tree.draws
    assert record != tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [-1, 0, 1, 4, 0]}, "node 3: parent 4 does not come before it"),
        ({"parents": [-1, 0, 1, 0, 1]}, "node 3 is out of order"),
        ({"parents": [0, 0, 1, 1, 0]}, "node 0 is the root"),
        ({"scores": [0, -1, -2, -3, np.nan]}, "node 4: score nan"),
        ({"scores": [0, -1, -0.5, -3, -2]}, "node 2: score -0.5 .* exceeds its parent's, -1"),
        ({"scores": [0, -1, -3, -2, -2]}, "node 2 is out of order"),
        ({"scores": [-0.1, -1, -2, -3, -2]}, "node 0 is the root"),
        ({"tokens": [9, 7, 8, 8, 5]}, "node 3: 8 is not a token id, or a sibling"),
        ({"tokens": [9, -7, 8, 6, 5]}, "node 1: -7 is not a token id"),
        ({"tokens": [9, 7, 8, 6]}, "each node, root too, needs one"),
        ({"draws": ((), ONE, ONE, (), (Draw(0, 1),))}, "node 3: draws"),
        ({"draws": (ONE, ONE, ONE, (Draw(0, 1),), (Draw(0, 1),))}, "node 0 is the root"),
        ({"draws": ((), ONE, ONE, ONE, (Draw(0, 1),))}, "node 1: draw 1 of draft 0"),
        ({"draws": ((), ONE, ONE, (Draw(0, 1),), (Draw(0, 2),))}, "node 0: draw 1 of draft 0"),
        ({"distributions": {(1, 0): np.ones(9)}}, "node 1: a ranked tree"),
        ({"distributions": {(1, 0): EVEN}, "kind": "iid"}, "node 0: the distribution .* draft 0 .* missing"),
        ({"distributions": {(0, 0): EVEN, (1, 0): np.eye(9)[8]}, "kind": "iid"}, "node 3: token 6 has no prob"),
        ({"distributions": {(i, 0): EVEN for i in range(3)}, "kind": "iid"}, "node 2: draft 0 has a distribution"),
        ({"distributions": {(0, 0): EVEN, (1, 0): np.ones(9)}, "kind": "iid"}, "node 1: .* draft 0 .* sums to 9"),
        ({"distributions": {(0, 0): EVEN, (1, 0): EVEN + np.inf}, "kind": "iid"}, "node 1: .* draft 0 .* sums to inf"),
    ],
)
def test_errors_name_the_node(change: dict, message: str) -> None:
    data = {name: getattr(small(), name) for name in ("tokens", "parents", "scores", "draws", "distributions", "kind")}
    with pytest.raises(TreeError, match=message):
        TokenTree(**(data | change))


@pytest.mark.parametrize(
    ("parents", "draws", "message"),
    [
        ([0, 3], [ONE, ONE], "listed node 1: parent 3"),
        ([0, 2], [ONE, ONE], "listed node 1 cannot be reached"),
        ([0, 1], [ONE, ()], "listed node 1 has no draw"),
        ([0], [ONE], "each listed node needs one"),
        ([0, 1], [ONE, (Draw(62, 0),)], "beyond 0 to 61"),
        ([0, 1], [ONE, (Draw(-1, 0),)], "beyond 0 to 61"),
    ],
)
def test_from_nodes_errors_name_the_listed_node(parents: list, draws: list, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        TokenTree.from_nodes(0, [1, 2], parents, [-1, -2], draws)


def test_a_listed_token_that_is_none_is_named() -> None:
    with pytest.raises(TreeError, match="listed node 1: -1 is not a token id"):
        TokenTree.from_nodes(0, [1, -1], [0, 1], [-1, -2], [ONE, ONE])
    with pytest.raises(TreeError, match="node 5 has a distribution"):
        TokenTree.from_nodes(0, [1], [0], [-1], [ONE], {(5, 0): np.ones(3)}, Kind.IID)


def test_networkx_attributes() -> None:
    graph = small().to_networkx()
    assert networkx.is_arborescence(graph)
    assert graph.nodes[3] == {"token": 6, "score": small().scores[3], "depth": 2, "draws": (Draw(0, 1),)}
    assert graph.edges[1, 2]["probability"] == pytest.approx(0.8)


def test_str_shows_ids() -> None:
    assert str(small()) == "9\n├─ 7      60%\n│  ├─ 8   80%\n│  └─ 6   10%\n└─ 5      30%"
    assert repr(small()) == "TokenTree(num_drafted=4, depth=2, kind='ranked')"
