"""Trees of a batch as arrays: every row is what it would be alone, and nothing is made that nobody looks at."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, VOCAB, TableSource, coarse_table, token_trees
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specinfer.errors import TreeError
from specinfer.tree import (
    BestFirst,
    Chain,
    DenseSource,
    Draw,
    Expansion,
    Forest,
    Frontier,
    Growth,
    Kind,
    Sampled,
    Slots,
    TokenTree,
    merge,
)
from specinfer.tree.nodes import ancestors


def batches(kind: Kind, drafts: tuple[int, ...], rows: int) -> st.SearchStrategy[list[TokenTree]]:
    """Trees of a batch; row r has root r, so that trees of other drafts can be merged with it."""
    return st.tuples(*(token_trees(kind=kind, drafts=drafts, root=row) for row in range(rows))).map(list)


def proposals() -> st.SearchStrategy[list[list[TokenTree]]]:
    """What three drafts propose for four rows."""
    return st.sampled_from(list(Kind)).flatmap(
        lambda kind: st.tuples(*(batches(kind, drafts, 4) for drafts in ((2,), (0, 3), (1,)))).map(list)
    )


@PROPERTY
@given(proposals())
def test_rows_are_merged_as_if_each_were_alone(proposed: list[list[TokenTree]]) -> None:
    assert Forest.merged(proposed) == [merge(own) for own in zip(*proposed, strict=True)]


@PROPERTY
@given(batches(Kind.RANKED, (0, 1), 4), st.integers(0, 12), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_rows_are_cut_as_if_each_were_alone(trees: list[TokenTree], count: int, depths: list[int]) -> None:
    forest = Forest.of(trees)
    assert forest.best(count) == [tree.best(count, tree.scores) for tree in trees]
    assert forest.pruned(depths) == [tree.pruned(depth) for tree, depth in zip(trees, depths, strict=True)]
    assert forest.pruned(depths).best(count).pruned([1] * 4) == [
        tree.pruned(depth).best(count, tree.pruned(depth).scores).pruned(1)
        for tree, depth in zip(trees, depths, strict=True)
    ]


@PROPERTY
@given(batches(Kind.RANKED, (0, 1), 3), st.integers(0, 20))
def test_the_best_nodes_of_all_rows_are_those_of_one_tree(trees: list[TokenTree], count: int) -> None:
    """Rows share the number: no node that is left out is worth more than one that is kept, and ancestors are kept."""
    found = Forest.of(trees).best(count, together=True)
    assert len(found.nodes) - 3 == min(count, sum(tree.num_drafted for tree in trees))
    paths = [{tuple(tree.path(node)): score for node, score in enumerate(tree.scores.tolist())} for tree in trees]
    kept = [{tuple(tree.path(node)) for node in range(len(tree))} for tree in found]
    assert all(path[:-1] in row for row in kept for path in row if path)
    inside = [paths[row][path] for row, own in enumerate(kept) for path in own if path]
    outside = [score for row, own in enumerate(paths) for path, score in own.items() if path not in kept[row]]
    assert min(inside, default=0.0) >= max(outside, default=-np.inf)


@PROPERTY
@given(st.sampled_from(list(Kind)).flatmap(lambda kind: batches(kind, (0, 1), 3)))
def test_a_forest_is_its_trees_and_back(trees: list[TokenTree]) -> None:
    forest = Forest.of(trees)
    assert Forest(forest.kind, forest.roots, forest.nodes) == trees  # made anew, from arrays
    assert (forest.roots, len(forest), len(forest.nodes)) == ([0, 1, 2], 3, sum(map(len, trees)))
    assert forest[-1] == trees[-1]
    assert forest[1:] == trees[1:]
    assert [own for tree in trees for own in tree.proposers] == forest.nodes.proposers.tolist()


@pytest.mark.parametrize("policy", [BestFirst(9, 4), Expansion((3, 2)), Sampled((3, 2)), Sampled((3, 2), True)])
def test_what_the_engine_builds_would_pass_every_check(policy: BestFirst | Expansion) -> None:
    """It is not validated again; here it is."""
    table = coarse_table(40, 11, VOCAB, seed=4)
    table = table.masked_fill(table.isneginf().all(-1, keepdim=True), 0.0).log_softmax(-1)
    sources = [TableSource(table, torch.Generator().manual_seed(3)), TableSource(table.flip(0))]
    grown = [policy.grow(source).trees([1] * 40, draft) for draft, source in enumerate(sources)]
    for tree in Forest.merged(grown).pruned([3, 1] * 20):
        assert TokenTree(tree.tokens, tree.parents, tree.scores, tree.draws, tree.distributions, tree.kind) == tree
        assert tree.num_drafted > 0


@pytest.mark.parametrize("policy", [BestFirst(9, 4), BestFirst(6, 3, 0.1), Expansion((3, 2, 1)), Chain(4)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_trees_are_put_in_order_where_they_were_grown(policy: BestFirst | Expansion, seed: int) -> None:
    """As on the host, ties included; padding comes last, and sees itself alone."""
    growth = policy.grow(TableSource(coarse_table(40, 11, VOCAB, seed)))
    *columns, depths, visible = growth.in_order(32, policy.max_depth)
    slots = Slots(columns[0], depths, visible, policy.max_nodes, policy.max_depth)
    found, wanted = Growth(*columns, growth.kind, (), slots).trees([1] * 40).nodes, growth.trees([1] * 40).nodes
    for name in ("starts", "tokens", "parents", "depths", "scores", "ranks"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    seen, size = ancestors(wanted), max(wanted.sizes)
    for row, (count, start) in enumerate(zip(wanted.sizes, wanted.starts, strict=False)):
        assert columns[3][row].tolist() == [True] * count + [False] * (32 - count)
        assert depths[row].tolist() == [*wanted.depths[start : start + count], *[0] * (32 - count)]
        assert np.array_equal(visible[row, :size, :size], seen[row])
        assert np.array_equal(visible[row, count:], np.eye(32, dtype=bool)[count:])


def test_nodes_stay_on_their_device_until_somebody_looks_at_them() -> None:
    policy, looks = BestFirst(6, 3), []
    growth = policy.grow(TableSource(coarse_table(3, 11, VOCAB, 4)))
    *columns, depths, visible = growth.in_order(8, 3)
    slots = Slots(columns[0], depths, visible, 6, 3)

    def read(*beside: torch.Tensor) -> tuple[Forest, list[torch.Tensor]]:
        looks.append(beside)
        return growth.trees([1, 2, 3]), [*beside]

    def trees() -> Forest:
        looks.clear()
        return Forest(growth.kind, [1, 2, 3], None, slots, read)

    pending = trees()
    assert Forest.merged([pending]) is pending.pruned([3, 4, 5]) is pending.best(6) is pending
    assert (pending.roots, len(pending), pending.kind, looks) == ([1, 2, 3], 3, Kind.RANKED, [])
    assert pending.fetched(depths)[0] is depths
    assert pending.slots is None
    assert (pending, len(looks)) == (growth.trees([1, 2, 3]), 1)
    for cut in (lambda forest: forest.pruned([3, 2, 3]), lambda forest: forest.best(5), lambda forest: forest[:2]):
        assert (cut(trees()), len(looks)) == (cut(growth.trees([1, 2, 3])), 1)
    other = BestFirst(2, 1).grow(TableSource(coarse_table(3, 11, VOCAB, 6))).trees([1, 2, 3], 1)
    assert (Forest.merged([trees(), other]), len(looks)) == (Forest.merged([growth.trees([1, 2, 3]), other]), 1)


def test_sampled_trees_are_not_chosen_from() -> None:
    forest = Sampled((3,)).grow(TableSource(coarse_table(2, 11, VOCAB, seed=4))).trees([1, 1])
    assert forest.best(3) == list(forest)
    with pytest.raises(TreeError, match="verified whole"):
        forest.best(1)


def test_candidates_that_are_asked_for_grow_like_the_nodes() -> None:
    """A hundred for every node of the tree, however large it is, and not as many as there are nodes."""

    class Counting(DenseSource):
        asked = 0

        def top(self, frontier: Frontier, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.asked += frontier.tokens.shape[1] * k
            return super().top(frontier, k)

    def distribution(frontier: Frontier) -> torch.Tensor:
        chance = torch.Generator().manual_seed(frontier.depth)
        return torch.randn(1, frontier.tokens.shape[1], 5000, generator=chance, dtype=torch.float64).log_softmax(-1)

    for nodes in (256, 1024, 4096):
        source = Counting(distribution, 1)
        (tree,) = BestFirst(nodes, 4).grow(source).trees([0])
        assert tree.num_drafted == nodes
        assert source.asked < 150 * nodes


def test_many_candidates_make_the_same_tree_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot enter the pool is left out before it is sorted, whatever their number."""
    table = torch.randn(5, 40, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3)
    table = table.log_softmax(-1)
    whole = BestFirst(60, 5).grow(TableSource(table)).trees([0] * 5)
    monkeypatch.setattr("specinfer.tree.policies.MANY", 0)
    assert BestFirst(60, 5).grow(TableSource(table)).trees([0] * 5) == whole
    monkeypatch.setattr("specinfer.tree.policies.MANY", 1 << 40)
    assert BestFirst(60, 5).grow(TableSource(table)).trees([0] * 5) == whole
    assert max(tree.depth for tree in whole) > 2
    assert np.unique([tree.num_drafted for tree in whole]).tolist() == [60]


def drawn(token: int, root: int = 0, draft: int = 0, kind: Kind = Kind.RANKED) -> TokenTree:
    """A tree of one node."""
    distributions = {} if kind is Kind.RANKED else {(0, draft): np.full(VOCAB, 1 / VOCAB)}
    return TokenTree.from_nodes(root, [token], [0], [-1.0], [(Draw(draft, 0),)], distributions, kind)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([drawn(1), drawn(1)], "draft 0 drew in two trees"),
        ([drawn(1, root=2, draft=1)] * 2, r"row 0: the roots are different tokens, \[0, 2\]"),
        ([drawn(1, draft=1, kind=Kind.IID)] * 2, "different kinds"),
        ([drawn(1, draft=1)], "1 and 2 rows"),
        ([drawn(1, draft=1), drawn(1, draft=1, kind=Kind.IID)], "different kinds"),
    ],
)
def test_what_drafts_may_not_propose_together_is_refused(other: list[TokenTree], message: str) -> None:
    """A draft that forgets its id, its row or its root would bias the text, or end it in another row."""
    with pytest.raises(TreeError, match=message):
        Forest.merged([[drawn(1), drawn(2)], other])


def test_a_row_that_is_kept_does_not_keep_the_others() -> None:
    """Records of a batch's rows end at different times."""
    table = coarse_table(30, 11, VOCAB, seed=4)
    forest = Forest.of(BestFirst(9, 4).grow(TableSource(table)).trees([1] * 30))
    nodes = forest[3].nodes
    for array in (nodes.tokens, nodes.parents, nodes.depths, nodes.scores, nodes.proposers, *nodes.draws):
        assert array.base is None or array.base.size <= array.size


def test_trees_that_draft_nothing_share_all_arrays_but_their_tokens() -> None:
    """A step of plain decoding makes one in each row, and results keep them."""
    first, second = Forest(Kind.RANKED, [5, 6])
    assert (first, second) == (TokenTree.root_only(5), TokenTree.root_only(6))
    for name in ("parents", "depths", "scores"):
        assert getattr(first, name) is getattr(second, name)
        with pytest.raises(ValueError, match="read-only"):
            getattr(first, name)[0] = 1
    assert first.tokens.base is None


def test_deep_trees_are_put_in_order_without_tables_of_all_levels() -> None:
    """A chain of 20,000 nodes: a table of every node's ancestors would take 3 GB."""
    count = 20_000
    chain = TokenTree.from_nodes(
        0, [5] * count, list(range(count)), [-float(i + 1) for i in range(count)], [(Draw(0, 0),)] * count
    )
    assert chain.depth == count
    assert chain.best(count - 1, chain.scores).num_drafted == count - 1


@pytest.mark.parametrize("policy", [BestFirst(9, 4, 0.01), BestFirst(9, 4), Expansion((3, 2)), Sampled((3, 2))])
def test_growing_never_leaves_the_device(policy: BestFirst | Expansion) -> None:
    """No operation reads or makes a tensor elsewhere, so none waits for the device."""
    seen: set[str] = set()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.update(own.device.type for own in tree_leaves((args, kwargs, result)) if isinstance(own, torch.Tensor))
            return result

    def distribution(frontier: Frontier) -> torch.Tensor:
        return torch.zeros(2, frontier.tokens.shape[1], 50, device="meta")

    with Spy():
        policy.grow(DenseSource(distribution, 2, device=torch.device("meta")))
    assert seen == {"meta"}
