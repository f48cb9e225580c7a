"""Growth policies on made-up distributions: against a heap, brute force and the distributions they draw from."""

import heapq
from itertools import product
from math import inf, isinf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from strategies import PROPERTY, TableSource, coarse_table, next_state

from specinfer.errors import PolicyError, TreeError
from specinfer.tree import (
    BestFirst,
    Chain,
    DenseSource,
    Expansion,
    Frontier,
    Growth,
    Kind,
    Policy,
    Sampled,
    TokenTree,
    draw_candidates,
    forest,
    policies,
    top_candidates,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
FALSE_ALARM = 1e-4  # chance that a chi-square test below fails for a correct sampler and a fresh seed


@pytest.fixture(params=["host", "device"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test also on the path for devices that nobody may wait for: static widths, no early end."""
    if request.param == "device":
        for module in (policies, forest):
            monkeypatch.setattr(module, "on_host", lambda device: False)
    return request.param


def heap_tree(table: list, max_nodes: int, max_depth: int) -> list[tuple[int, int, float]]:
    """Textbook best-first search of one row, one node at a time: (token, parent, score), the root first.

    A node's key is (score descending, depth ascending, the parent's key, sibling rank).
    """
    nodes = [(-1, -1, 0.0)]
    heap: list[tuple] = []

    def expand(parent: int, key: tuple, state: int) -> None:
        depth, score = key[1], -key[0]
        if depth == max_depth:
            return
        children = sorted((-value, token) for token, value in enumerate(table[state]) if not isinf(value))
        for rank, (cost, token) in enumerate(children):
            child = (-(score - cost), depth + 1, key, rank)
            heapq.heappush(heap, (child, token, parent, next_state(state, token, len(table))))

    expand(0, (-0.0, 0), 0)
    while heap and len(nodes) <= max_nodes:
        key, token, parent, state = heapq.heappop(heap)
        nodes.append((token, parent, -key[0]))
        expand(len(nodes) - 1, key, state)
    return nodes


def rows(growth: Growth) -> list[list[tuple[int, int, float]]]:
    """The slots of each row that are nodes, as `heap_tree` gives them."""
    columns = (growth.tokens, growth.parents, growth.scores, growth.valid)
    return [
        [tuple(node[:3]) for node in zip(*row, strict=True) if node[3]]
        for row in zip(*(column.tolist() for column in columns), strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_best_first_is_the_heaps_tree_on_10000_distributions_with_ties(device: str, route: str) -> None:
    """Node for node and in the same order, in batches of 50; never more rounds than `max_depth`."""
    chance = np.random.default_rng(1)
    for seed in range(200):
        vocab, max_nodes, max_depth = (int(chance.integers(*bounds)) for bounds in ((2, 9), (0, 13), (0, 6)))
        table = coarse_table(50, 11, vocab, seed)
        source = TableSource(table.to(device))
        growth = BestFirst(max_nodes, max_depth).grow(source)
        assert rows(growth) == [heap_tree(row, max_nodes, max_depth) for row in table.tolist()]
        assert len(source.frontiers) <= min(max_depth, max_nodes)


def test_min_probability_leaves_out_the_unlikely_paths_and_nothing_else(route: str) -> None:
    """A threshold gives the heap's tree cut off where path probabilities fall below it."""
    table = coarse_table(50, 11, 6, seed=5)
    growth = BestFirst(9, 4, min_probability=0.1).grow(TableSource(table))
    for got, row in zip(rows(growth), table.tolist(), strict=True):
        assert got == [node for node in heap_tree(row, 9, 4) if node[2] >= np.log(0.1)]
    with pytest.raises(PolicyError, match=r"between 0 and 1, got 1\.5"):
        BestFirst(4, 2, min_probability=1.5)


def test_only_as_many_nodes_of_a_level_are_asked_about_as_are_wanted(route: str) -> None:
    """Nodes beyond the wanted ones stay leaves; the rest of the tree is the heap's of what was asked."""
    table = coarse_table(30, 11, 6, seed=6)
    source = TableSource(table)
    growth = policies.grow_best_first(source, 12, 4, wanted=lambda frontier, _: 2 if frontier.depth < 3 else 0)
    assert [frontier.tokens.shape[1] for frontier in source.frontiers] == [1, 2, 2]
    for nodes, row in zip(rows(growth), table.tolist(), strict=True):
        parents = {parent for _, parent, _ in nodes}
        depth = [0]  # of each node
        for _, parent, _ in nodes[1:]:
            depth.append(depth[parent] + 1)
        inner = [node for node in parents if node > 0]
        assert all(sum(depth[place] == level for place in inner) <= 2 for level in (1, 2))
        assert max(depth) <= 3
        expected = heap_tree(row, 12, 1)
        assert [node for node in nodes if node[1] <= 0] == expected[: sum(node[1] <= 0 for node in nodes)]


def test_more_nodes_wanted_than_a_level_has_are_all_of_them(route: str) -> None:
    table = coarse_table(30, 11, 6, seed=6)
    growth = policies.grow_best_first(TableSource(table), 12, 4, wanted=lambda *_: 99)
    assert rows(growth) == [heap_tree(row, 12, 4) for row in table.tolist()]


def test_best_first_scores_only_nodes_that_can_have_children_in_the_tree(route: str) -> None:
    """Frontiers fit their static bound, hold real ids even as padding, and on the host no needless column."""
    source = TableSource(coarse_table(40, 11, 6, seed=4))
    BestFirst(8, 5).grow(source)
    assert [f.depth for f in source.frontiers] == list(range(len(source.frontiers)))
    for frontier in source.frontiers[1:]:
        assert frontier.tokens.shape[1] <= 8 - frontier.depth
        assert frontier.tokens.ge(0).all()
        assert frontier.tokens.lt(6).all()
        if route == "host":
            assert frontier.valid.any(0).all(), "no column is all padding"


@PROPERTY
@given(st.integers(2, 8), st.integers(0, 12), st.integers(0, 5), st.integers(0, 9999))
def test_best_first_is_closed_and_best(vocab: int, max_nodes: int, max_depth: int, seed: int) -> None:
    """Ancestors and better siblings of a node are in the tree, and no path outside beats one inside."""
    table = coarse_table(1, 7, vocab, seed)
    (tree,) = BestFirst(max_nodes, max_depth).grow(TableSource(table)).trees([0])
    inside = {tuple(tree.path(node)): tree.scores[node] for node in range(len(tree))}
    worst = min(inside.values())
    for path, score in brute_force(table[0].tolist(), min(max_depth, 3)).items():
        if path not in inside:
            assert len(tree) - 1 == max_nodes
            assert score <= worst
    for node in range(len(tree)):
        draws = tree.draws_under(node)
        assert [draw.order for draw, _ in draws] == list(range(len(draws)))


def brute_force(table: list, max_depth: int) -> dict[tuple[int, ...], float]:
    """The score of every path of positive probability, the empty one left out."""
    scores, level = {}, {(): (0.0, 0)}
    for _ in range(max_depth):
        level = {
            (*path, token): (score + value, next_state(state, token, len(table)))
            for path, (score, state) in level.items()
            for token, value in enumerate(table[state])
            if not isinf(value)
        }
        scores |= {path: score for path, (score, _) in level.items()}
    return scores


def test_widths_takes_the_likeliest_children_of_every_node(route: str) -> None:
    table = coarse_table(30, 11, 5, seed=2)
    trees = Expansion((2, 1, 3)).grow(TableSource(table)).trees(range(30))
    for row, tree in zip(table.tolist(), trees, strict=True):
        for node in range(len(tree)):
            state = 0
            for token in tree.path(node):
                state = next_state(state, token, 11)
            width = [2, 1, 3, 0][tree.depths[node]]
            ranked = sorted((-value, token) for token, value in enumerate(row[state]) if not isinf(value))
            drawn = [int(tree.tokens[child]) for _, child in tree.draws_under(node)]
            assert drawn == [token for _, token in ranked[:width]]


def test_chain_is_one_path() -> None:
    table = torch.log_softmax(torch.randn(2, 11, 9, generator=torch.Generator().manual_seed(0)), -1)
    chain = Chain(4)
    assert (chain.max_nodes, chain.max_depth, repr(chain)) == (4, 4, "Chain(length=4)")
    for tree in chain.grow(TableSource(table)).trees([1, 2]):
        assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert Chain(0).grow(TableSource(table)).trees([1, 2]) == [TokenTree.root_only(t) for t in (1, 2)]


POLICIES = [
    BestFirst(6, 3),
    Expansion((2, 2, 1)),
    Chain(3),
    Sampled((2, 2, 1)),
    Sampled((2, 2, 1), replacement=True),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_no_budget_asks_nothing(policy: Policy) -> None:
    source = TableSource(coarse_table(3, 4, 5, seed=0))
    trees = policy.grow(source, max_depth=0).trees([4, 5, 6], draft=2)
    assert trees == [TokenTree.root_only(token, policy.kind) for token in (4, 5, 6)]
    assert not source.frontiers


@pytest.mark.parametrize("policy", [BestFirst(0, 4), BestFirst(4, 0), Expansion(()), Sampled(())], ids=repr)
def test_a_policy_without_budget_asks_nothing(policy: Policy) -> None:
    source = TableSource(coarse_table(1, 4, 5, seed=0))
    assert policy.grow(source).trees([4]) == [TokenTree.root_only(4, policy.kind)]
    assert not source.frontiers


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_max_depth_limits_one_call(policy: Policy, route: str) -> None:
    source = TableSource(torch.zeros(2, 4, 5) - np.log(5), torch.Generator().manual_seed(0))
    for tree in policy.grow(source, max_depth=1).trees([0, 0]):
        assert tree.depth == 1
    assert len(source.frontiers) == 1


def test_one_node_needs_one_round() -> None:
    source = TableSource(coarse_table(5, 4, 5, seed=1))
    BestFirst(1, 9).grow(source)
    assert len(source.frontiers) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_impossible_tokens_never_enter(policy: Policy, route: str) -> None:
    """One-hot rows give chains, rows without any possible token bare roots, side by side in one batch."""
    one_hot, nothing = torch.full((4, 5), -inf), torch.full((4, 5), -inf)
    one_hot[:, 3] = 0
    source = TableSource(torch.stack([one_hot, nothing, torch.zeros(4, 5) - np.log(5)]))
    chain, bare, full = policy.grow(source).trees([0, 0, 0])
    assert chain.paths() == [[3, 3, 3]]
    assert bare == TokenTree.root_only(0, policy.kind)
    assert full.num_drafted > 3 or policy.max_nodes == 3 or policy.kind is Kind.IID


def test_more_nodes_than_the_vocabulary_allows(route: str) -> None:
    (tree,) = BestFirst(100, 2).grow(TableSource(torch.full((1, 4, 3), -np.log(3)))).trees([0])
    assert tree.num_drafted == 3 + 9
    (tree,) = Expansion((9, 9)).grow(TableSource(torch.full((1, 4, 3), -np.log(3)))).trees([0])
    assert tree.num_drafted == 3 + 9


def test_rounding_above_probability_one_is_forgiven() -> None:
    (tree,) = BestFirst(3, 3).grow(TableSource(torch.full((1, 4, 1), 1e-7))).trees([0])
    assert tree.scores.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_reach_the_host_exactly(dtype: torch.dtype) -> None:
    table = torch.log_softmax(torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(3)), -1).to(dtype)
    (tree,) = Chain(1).grow(TableSource(table)).trees([0])
    assert tree.scores[1] == table[0, 0].max().item()


def test_log_probabilities_that_are_not_numbers_are_an_error() -> None:
    growth = BestFirst(2, 2).grow(TableSource(torch.full((1, 4, 3), float("nan"))))
    with pytest.raises(TreeError, match="not a number"):
        growth.trees([0])


def test_one_root_per_row() -> None:
    growth = Chain(1).grow(TableSource(torch.zeros(2, 4, 3)))
    with pytest.raises(TreeError, match="1 roots for 2"):
        growth.trees([0])


@pytest.mark.parametrize("cut", [slice(1, None), slice(0, 0)])
def test_a_growth_begins_with_its_roots(cut: slice) -> None:
    """Without them the first drafted node would be taken for the root, and all parents would be off by one."""
    made = Expansion((2, 1)).grow(TableSource(torch.zeros(2, 4, 3)))
    columns = {name: getattr(made, name)[:, cut] for name in ("tokens", "parents", "scores", "valid")}
    with pytest.raises(TreeError, match="slot 0 of a grown tree is its root"):
        made._replace(**columns).trees([0, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestFirst(-1, 2),
        lambda: BestFirst(2, -1),
        lambda: BestFirst(2.0, 1),
        lambda: BestFirst(True, 1),
        lambda: Expansion((1, 0)),
        lambda: Expansion((1, "2")),
        lambda: Chain(-1),
        lambda: Chain(True),
        lambda: Sampled((1, -1)),
        lambda: Sampled((1,), replacement=1),
        lambda: Chain(1).grow(TableSource(torch.zeros(1, 4, 3)), max_depth=-1),
    ],
)
def test_impossible_budgets_are_refused(make) -> None:
    with pytest.raises(PolicyError, match=r"must be .*, got "):
        make()


@pytest.mark.parametrize("make", [lambda: BestFirst(10**9, 8), lambda: Chain(10**9), lambda: Expansion((3000, 3000))])
def test_trees_that_no_target_scores_are_refused(make) -> None:
    """Before memory runs out."""
    with pytest.raises(PolicyError, match="more than any target scores in one pass"):
        make()


def test_policies_say_their_size() -> None:
    sizes = [(p.max_nodes, p.max_depth, p.kind.value) for p in POLICIES]
    assert sizes == [
        (6, 3, "ranked"),
        (10, 3, "ranked"),
        (3, 3, "ranked"),
        (10, 3, "without-replacement"),
        (10, 3, "iid"),
    ]


def test_top_candidates_of_a_real_vocabulary_with_ties() -> None:
    """Against a stable sort: V = 151,936, few distinct values, rows of one value, of -inf, and one-hot."""
    log_probs = -torch.randint(0, 40_000, (4, 2, 151_936), generator=torch.Generator().manual_seed(0)).float()
    log_probs[0, 0] = 0
    log_probs[0, 1] = -inf
    log_probs[1, 0] = -inf
    log_probs[1, 0, 151_935] = 0
    values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    for k in (1, 16, 64):
        got = top_candidates(log_probs, k)
        assert torch.equal(got[0], tokens[..., :k])
        assert torch.equal(got[1], values[..., :k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "k"), [(7, 7), (300, 64), (65537, 5)])
def test_top_candidates_of_16_bit_values_break_ties_by_place(dtype: torch.dtype, vocab: int, k: int) -> None:
    torch.manual_seed(vocab)
    log_probs = (torch.randn(2, 3, vocab) * 4).round().to(dtype) / 2
    log_probs[0, 0, :3] = torch.tensor([-0.0, 0.0, -torch.inf])
    values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    got = top_candidates(log_probs, k)
    assert torch.equal(got[0], tokens[..., :k])
    assert torch.equal(got[1], values[..., :k])


@PROPERTY
@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([1, 2, 3, 8]), st.integers(0, 9999))
def test_top_candidates_is_a_stable_sort(vocab: int, k: int, block: int, seed: int) -> None:
    log_probs = -torch.randint(0, 3, (3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    log_probs[log_probs == -2] = -inf
    values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    got = top_candidates(log_probs, k, block)
    assert torch.equal(got[0], tokens[..., :k])
    assert torch.equal(got[1], values[..., :k])


LAW = torch.tensor([0.4, 0.3, 0.0, 0.2, 0.1], dtype=torch.float64)


def one_law(batch: int, seed: int) -> DenseSource:
    """A source of one distribution everywhere, as logits that are not normalised."""
    logits = (7 * LAW).log()
    return DenseSource(
        lambda frontier: logits.expand(*frontier.tokens.shape, -1), batch, torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("replacement", [True, False])
def test_ordered_pairs_of_draws_have_the_exact_law(replacement: bool) -> None:
    """Chi-square over the ordered pairs drawn under the root and under its first child, 40,000 each.

    The seed is fixed, so the test cannot flicker; for a fresh one a false alarm has the odds 2 * FALSE_ALARM.
    """
    growth = Sampled((2, 2), replacement).grow(one_law(40_000, seed=5))
    q = LAW.tolist()
    expected = {
        (a, b): q[a] * (q[b] if replacement else q[b] / (1 - q[a]))
        for a, b in product(range(5), repeat=2)
        if q[a] and q[b] and (replacement or a != b)
    }
    assert sum(expected.values()) == pytest.approx(1)
    for first in (1, 3):  # the slots of the root's draws, then of the first child's
        pairs = list(map(tuple, growth.tokens[:, first : first + 2].tolist()))
        assert set(pairs) <= set(expected)
        counts = [pairs.count(pair) for pair in expected]
        assert chisquare(counts, 40_000 * np.array(list(expected.values()))).pvalue > FALSE_ALARM


def test_a_wrong_law_fails_the_same_test() -> None:
    """Power: draws sorted by probability, instead of in drawing order, are told from the distribution."""
    pairs = Sampled((2,)).grow(one_law(40_000, seed=5)).tokens[:, 1:3].tolist()
    q = LAW.tolist()
    expected = {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in product((0, 1, 3, 4), repeat=2) if a != b}
    sorted_pairs = [tuple(sorted(pair)) for pair in pairs]
    counts = [sorted_pairs.count(pair) for pair in expected]
    assert chisquare(counts, 40_000 * np.array(list(expected.values()))).pvalue < 1e-9


@pytest.mark.parametrize("replacement", [True, False])
def test_sampled_trees_hold_their_draws_and_laws(replacement: bool) -> None:
    """Every listed draw is in the tree, its score is log q of its path, and its distribution is the one drawn from."""
    table = torch.log_softmax(torch.randn(20, 11, 5, generator=torch.Generator().manual_seed(1)).double(), -1)
    growth = Sampled((3, 2, 2), replacement).grow(TableSource(table, torch.Generator().manual_seed(2)))
    for row, tree in zip(table.exp().numpy(), growth.trees([0] * 20, draft=6), strict=True):
        assert sum(map(len, tree.draws)) == 3 + 6 + 12
        assert {draw.draft for draws in tree.draws for draw in draws} == {6}
        for node in range(len(tree)):
            state, probability = 0, 1.0
            for token in tree.path(node):
                probability *= row[state][token]
                state = next_state(state, token, 11)
            assert tree.scores[node] == pytest.approx(np.log(probability))
            if tree.children(node):
                assert tree.distributions[node, 6] == pytest.approx(row[state])
        if not replacement:
            assert max(map(len, tree.draws)) == 1
        else:
            for node in range(1, len(tree)):
                below = len(tree.draws_under(node))
                assert below == [0, 2, 2, 0][tree.depths[node]] * len(tree.draws[node])


def test_without_replacement_stops_where_nothing_is_left() -> None:
    (tree,) = Sampled((5, 9)).grow(one_law(1, seed=0)).trees([0])
    assert sorted(tree.tokens[tree.children(0)].tolist()) == [0, 1, 3, 4]
    assert all(len(tree.children(child)) == 4 for child in tree.children(0))


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_of_a_real_vocabulary(replacement: bool) -> None:
    """V = 151,936 of which two tokens are possible: nothing else is ever drawn, and nothing overflows."""
    log_probs = torch.full((1, 3, 151_936), -inf)
    log_probs[..., [7, 151_935]] = torch.tensor([-300.0, -300.5])
    tokens, values, distributions = draw_candidates(log_probs, 2, replacement, torch.Generator().manual_seed(0))
    assert set(tokens.flatten().tolist()) <= {7, 151_935}
    assert torch.equal(values, distributions.gather(-1, tokens).log())
    assert distributions.sum(-1).tolist() == [[pytest.approx(1)] * 3]


def test_sampled_growth_repeats_with_its_generator() -> None:
    one, other = (Sampled((2, 2)).grow(one_law(9, seed=8)).trees([0] * 9) for _ in range(2))
    assert one == other
    assert one != Sampled((2, 2)).grow(one_law(9, seed=9)).trees([0] * 9)


def test_the_root_frontier_is_marked_unknown() -> None:
    seen: list[Frontier] = []

    def log_probs(frontier: Frontier) -> torch.Tensor:
        seen.append(frontier)
        return torch.zeros(*frontier.tokens.shape, 3)

    Chain(2).grow(DenseSource(log_probs, 2))
    assert (seen[0].tokens.tolist(), seen[0].parents.tolist(), seen[0].depth) == (
        [[-1], [-1]],
        [[-1], [-1]],
        0,
    )
    assert (seen[1].tokens.tolist(), seen[1].parents.tolist(), seen[1].depth) == ([[0], [0]], [[0], [0]], 1)
