"""Layouts and masks: who sees whom, at which position, in the form each attention implementation takes."""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, MistralConfig

from specinfer.attention import Layout, TreeCache, lay_out_chains, lay_out_level
from specinfer.attention.context import AttentionSpec
from specinfer.attention.layout import attention_mask, lay_out_trees
from specinfer.attention.passes.plain import Padded, SideBySide
from specinfer.errors import UnsupportedModel
from specinfer.tree import Draw, Frontier, TokenTree

CPU = torch.device("cpu")
SDPA = AttentionSpec("sdpa", {"full_attention": None})


def random_tree(chance: random.Random, drafted: int) -> TokenTree:
    parents = [chance.randrange(node + 1) for node in range(drafted)]
    tokens = chance.sample(range(100), drafted)
    scores = [-float(node + 1) - chance.randrange(3) for node in range(drafted)]
    scores = [min(score, scores[p - 1] if p else 0) for score, p in zip(scores, parents, strict=True)]
    return TokenTree.from_nodes(chance.randrange(100), tokens, parents, scores, [[Draw(0, 0)]] * drafted)


@st.composite
def forests(draw: st.DrawFn) -> list[TokenTree]:
    """One to three trees of 1 to 9 nodes."""
    chance = draw(st.randoms(use_true_random=False))
    return [random_tree(chance, draw(st.integers(0, 8))) for _ in range(draw(st.integers(1, 3)))]


def closure(tree: TokenTree) -> list[set[int]]:
    """Each node's ancestors and itself, by following parents until nothing changes."""
    seen = [{node} for node in range(len(tree))]
    changed = True
    while changed:
        changed = False
        for node, parent in enumerate(tree.parents.tolist()):
            if parent >= 0 and not seen[parent] <= seen[node]:
                seen[node] |= seen[parent]
                changed = True
    return seen


def columns_seen(row: Tensor) -> set[int]:
    return set(row.nonzero().flatten().tolist())


def starts_of(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:row]) for row in range(len(sizes))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.booleans(), st.integers(0, 7))
def test_padding_repeats_a_node_and_values_come_back(sizes: list[int], at_end: bool, width: int) -> None:
    """Rows end together where the last nodes' logits are wanted; else they begin together."""
    layout = lay_out_chains([range(1, size + 1) for size in sizes], CPU)
    wanted = [range(size - min(size, 2), size) for size in sizes] if at_end else None
    placed = Padded(layout._replace(wanted=wanted), width)
    nodes = torch.arange(len(layout.tokens))
    found = placed(nodes)
    assert found.shape == (len(sizes), max(*sizes, width))
    rows = [nodes[start : start + size].tolist() for start, size in zip(starts_of(sizes), sizes, strict=True)]
    assert [row.tolist() for row in placed.states(found)] == rows
    for row, line, turn in zip(rows, found.tolist(), placed.turn, strict=True):
        assert line[turn : turn + len(row)] == row
        assert not row or {*line[:turn], *line[turn + len(row) :]} <= {row[-1]}
    if wanted is None:
        assert placed.columns is None
        return
    assert len(placed.columns or ()) == max(map(len, wanted))
    logits = placed.logits(found[:, placed.columns])
    assert [row.tolist() for row in logits] == [row[-2:] for row in rows]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.booleans())
def test_nodes_side_by_side_are_those_of_the_rows(sizes: list[int], some: bool) -> None:
    layout = lay_out_chains([range(1, size + 1) for size in sizes], CPU)
    wanted = [range(size // 2, size) for size in sizes] if some else None
    placed = SideBySide(layout._replace(wanted=wanted))
    found = placed(layout.tokens)
    assert found.data_ptr() == layout.tokens.data_ptr()
    assert [row.tolist() for row in placed.states(found)] == [[*range(1, size + 1)] for size in sizes]
    logits = placed.logits(found if placed.columns is None else found[:, placed.columns])
    assert [row.tolist() for row in logits] == [[*range(size // 2 + 1 if some else 1, size + 1)] for size in sizes]


def test_slots_of_nodes() -> None:
    """Padding is written behind a row's nodes, wherever it stands among them."""
    layout = lay_out_chains([[7, 8, 9], [5]], CPU)
    cache = TreeCache(2, 16)
    cache.lengths = [4, 1]
    assert SideBySide(layout).stage(layout, layout.after(cache.lengths), cache)["cache_slots"].tolist() == [
        [4, 5, 6, 1]
    ]
    assert cache.pending == [3, 1]
    cache.pending = [0, 0]
    Padded(layout).stage(layout, layout.after(cache.lengths), cache)
    assert cache.staged(CPU).tolist() == [[4, 5, 6], [1, 2, 3]]
    cache.pending = [0, 0]
    ends = layout._replace(wanted=[range(2, 3), range(1)])
    Padded(ends).stage(ends, ends.after(cache.lengths), cache)
    assert cache.staged(CPU).tolist() == [[4, 5, 6], [2, 3, 1]]


@settings(deadline=None)
@given(forests())
def test_trees_see_their_transitive_closure(forest: list[TokenTree]) -> None:
    layout, sizes = lay_out_trees(forest, CPU), [*map(len, forest)]
    assert layout.sizes == sizes
    assert layout.wanted is None
    assert layout.visible.shape == (sum(sizes), max(sizes))
    assert layout.tokens.tolist() == [token for tree in forest for token in tree.tokens.tolist()]
    assert layout.node_depths.tolist() == [depth for tree in forest for depth in tree.depths.tolist()]
    assert layout.rows.tolist() == [row for row, size in enumerate(sizes) for _ in range(size)]
    assert layout.columns.tolist() == [column for size in sizes for column in range(size)]
    assert [columns_seen(line) for line in layout.visible] == [seen for tree in forest for seen in closure(tree)]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=3).filter(any))
def test_chains_see_what_came_before(chains: list[list[int]]) -> None:
    layout = lay_out_chains(chains, CPU)
    assert layout.tokens.tolist() == [token for chain in chains for token in chain]
    columns = [column for chain in chains for column in range(len(chain))]
    assert layout.node_depths.tolist() == layout.columns.tolist() == columns
    assert [columns_seen(line) for line in layout.visible] == [{*range(column + 1)} for column in columns]


@settings(deadline=None)
@given(forests(), st.data())
def test_trees_behind_unread_tokens_see_them(forest: list[TokenTree], data: st.DataObject) -> None:
    """And nothing else sees these; logits are wanted of the trees."""
    unread = [data.draw(st.lists(st.integers(0, 99), max_size=6)) for _ in forest]
    layout = lay_out_trees(forest, CPU, unread)
    sizes = [len(tokens) + len(tree) for tokens, tree in zip(unread, forest, strict=True)]
    assert layout.sizes == sizes
    wanted = [range(len(tokens), size) for tokens, size in zip(unread, sizes, strict=True)]
    assert layout.wanted == (wanted if any(unread) else None)
    lines = iter(zip(layout.tokens.tolist(), layout.node_depths.tolist(), layout.visible, strict=True))
    for tokens, tree in zip(unread, forest, strict=True):
        count = len(tokens)
        for column, token in enumerate(tokens):
            found, depth, seen = next(lines)
            assert (found, depth, columns_seen(seen)) == (token, column, {*range(column + 1)})
        for token, above, ancestors in zip(tree.tokens.tolist(), tree.depths.tolist(), closure(tree), strict=True):
            found, depth, seen = next(lines)
            assert (found, depth) == (token, count + above)
            assert columns_seen(seen) == {*range(count)} | {count + node for node in ancestors}


def test_a_chain_is_the_tree_of_one_branch() -> None:
    chain = [7, 8, 9, 3]
    tree = TokenTree.from_nodes(7, chain[1:], [0, 1, 2], [-1.0, -2.0, -3.0], [[Draw(0, 0)]] * 3)
    one, other = lay_out_chains([chain], CPU), lay_out_trees([tree], CPU)
    assert one[6:] == other[6:] == ([4], None, {}, None, False, None)
    for a, b in zip(one[:5], other[:5], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [4, 7])
def test_padding_stands_beside_the_nodes_and_writes_behind_them(width: int) -> None:
    """Of trees it comes last, of chains first; either way it repeats a row's last node."""
    chains = [[7, 8, 9, 3], [5, 6], [4]]
    trees = [
        TokenTree.from_nodes(
            first, rest, range(len(rest)), [-1.0 - n for n in range(len(rest))], [[Draw(0, 0)]] * len(rest)
        )
        for first, *rest in chains
    ]
    for padded, plain in (
        (lay_out_trees(trees, CPU, width=width), lay_out_trees(trees, CPU)),
        (lay_out_chains(chains, CPU, width), lay_out_chains(chains, CPU)),
    ):
        assert padded.sizes == plain.sizes
        order = padded.order
        assert torch.equal(padded.rows, torch.arange(3).repeat_interleave(width))
        assert torch.equal(padded.tokens, plain.tokens[order].flatten())
        assert torch.equal(padded.node_depths, plain.node_depths[order].flatten())
        assert torch.equal(padded.visible[:, : plain.visible.shape[1]], plain.visible[order].flatten(0, 1))
        assert not padded.visible[:, plain.visible.shape[1] :].any()
        for row, (columns, size) in enumerate(zip(padded.columns.view(3, width).tolist(), plain.sizes, strict=True)):
            turn = width - size if padded.at_end else 0
            assert columns[turn : turn + size] == [*range(size)]
            assert sorted(columns) == [*range(width)]
            first = sum(plain.sizes[:row])
            assert order[row, turn : turn + size].tolist() == [*range(first, first + size)]


def levels(forest: Sequence[TokenTree], chance: random.Random) -> Iterator[tuple[Frontier, list[list[int | None]]]]:
    """Say what a policy asks for while these trees grow: per level a frontier, and the node in each place.

    Nodes stand in any order within a level, padding anywhere among them.
    """
    sent: list[dict[int, int]] = [{0: 0} for _ in forest]  # node -> index among all sent, padding counted
    count = 1
    for depth in range(1, max(tree.depth for tree in forest) + 1):
        rows = [[node for node in range(len(tree)) if tree.depths[node] == depth] for tree in forest]
        width = max(map(len, rows)) + chance.randrange(2)
        places: list[list[int | None]] = [[*row, *[None] * (width - len(row))] for row in rows]
        for row in places:
            chance.shuffle(row)
        tokens = [
            [chance.randrange(99) if n is None else int(t.tokens[n]) for n in r]
            for t, r in zip(forest, places, strict=True)
        ]
        parents = [
            [chance.randrange(count) if n is None else index[int(t.parents[n])] for n in r]
            for t, r, index in zip(forest, places, sent, strict=True)
        ]
        valid = [[node is not None for node in row] for row in places]
        yield Frontier(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), depth), places
        for index, row in zip(sent, places, strict=True):
            index.update({node: count + place for place, node in enumerate(row) if node is not None})
        count += width


@settings(deadline=None)
@given(forests().filter(lambda forest: any(tree.depth for tree in forest)), st.randoms(use_true_random=False))
def test_a_tree_laid_out_level_by_level_is_the_tree_laid_out_whole(
    forest: list[TokenTree], chance: random.Random
) -> None:
    whole = lay_out_trees(forest, CPU)
    first_of = starts_of([*map(len, forest)])
    level: Layout | None = None
    columns: list[list[int | None]] = [[] for _ in forest]  # the node in each pending column
    for frontier, places in levels(forest, chance):
        level = lay_out_level(frontier, level, CPU)
        columns = [old + new for old, new in zip(columns, places, strict=True)]
        assert level.depths.shape == (len(forest), len(columns[0]))
        width = level.sizes[0]
        assert level.sizes == [width] * len(forest)
        for row, (tree, nodes) in enumerate(zip(forest, columns, strict=True)):
            first = len(nodes) - width
            for place, node in enumerate(nodes[first:]):
                number = row * width + place
                assert (level.rows[number], level.columns[number]) == (row, first + place)
                seen = columns_seen(level.visible[number])
                assert first + place in seen
                if node is None:  # padding, whose states nobody looks at
                    continue
                ancestors = {nodes[column] for column in seen} | {0}  # the root is committed
                assert ancestors == columns_seen(whole.visible[first_of[row] + node])
                assert len(seen) == tree.depths[node]
                assert level.tokens[number] == tree.tokens[node]
            # positions count from the committed length, and the root is committed before growth starts
            real = [column for column, node in enumerate(nodes) if node is not None]
            assert level.depths[row, real].tolist() == [int(tree.depths[nodes[column]]) - 1 for column in real]


def slow_mask(layout: Layout, lengths: Sequence[int], window: int | None) -> Tensor:
    """Decide for each node and cache column on its own whether one attends to the other."""
    nodes, pending = layout.visible.shape
    mask = torch.zeros(nodes, max(lengths) + pending, dtype=torch.bool)
    for node, (row, own) in enumerate(zip(layout.rows.tolist(), layout.columns.tolist(), strict=True)):
        length = lengths[row]
        positions = [*range(length), *(length + layout.depths[row]).tolist()]
        for column, there in enumerate(positions):
            related = column < length or bool(layout.visible[node, column - length])
            mask[node, column] = related and (window is None or positions[length + own] - there < window)
    return mask


def mask_of(spec: AttentionSpec, layout: Layout, lengths: Sequence[int], dtype: torch.dtype, *arrange: Any) -> Any:
    """Return the mask of the columns that the longest row may have."""
    kv_length = max(lengths) + layout.visible.shape[1]
    return attention_mask(spec, layout, layout.after(lengths), dtype, kv_length, *arrange)


@settings(deadline=None, max_examples=60)
@given(forests(), st.data(), st.sampled_from([None, 1, 2, 4, 9]))
def test_masks_equal_a_decision_per_pair(forest: list[TokenTree], data: st.DataObject, window: int | None) -> None:
    layout = lay_out_trees(forest, CPU)
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=len(forest), max_size=len(forest)))
    wanted = slow_mask(layout, lengths, window)
    name = "full_attention" if window is None else "sliding_attention"
    for implementation, dtype in product(("sdpa", "eager"), (torch.float32, torch.bfloat16, torch.float64)):
        added = mask_of(AttentionSpec(implementation, {name: window}), layout, lengths, dtype)
        assert added.dtype == dtype
        assert added.shape == (1, 1, *wanted.shape)
        assert torch.equal(added[0, 0] == 0, wanted)
        assert (added[0, 0][~wanted] == torch.finfo(dtype).min).all()


@settings(deadline=None, max_examples=40)
@given(
    forests().filter(lambda forest: any(tree.depth for tree in forest)),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 2, 4]),
)
def test_masks_of_later_levels_equal_a_decision_per_pair(
    forest: list[TokenTree], chance: random.Random, window: int | None
) -> None:
    level: Layout | None = None
    lengths = [chance.randrange(1, 6) for _ in forest]
    for frontier, _ in levels(forest, chance):
        level = lay_out_level(frontier, level, CPU)
        mask = mask_of(AttentionSpec("sdpa", {"any": window}), level, lengths, torch.float32)
        assert torch.equal(mask[0, 0] == 0, slow_mask(level, lengths, window))


def test_a_window_counts_positions_and_not_columns() -> None:
    # root 1, its children 2 and 3, and 4 under 3: node 4 is in the fourth column but at the third position
    draws = [[Draw(0, 0)], [Draw(0, 1)], [Draw(0, 0)]]
    tree = TokenTree.from_nodes(1, [2, 3, 4], [0, 0, 2], [-1.0, -2.0, -3.0], draws)
    spec = AttentionSpec("sdpa", {"sliding_attention": 3})
    mask = mask_of(spec, lay_out_trees([tree], CPU), [2], torch.float32)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 1],
    ]


def test_every_row_of_a_mask_attends_to_something() -> None:
    chance = random.Random(0)
    forest = [random_tree(chance, size) for size in (0, 3, 8)]
    for window in (None, 1, 3):
        mask = mask_of(AttentionSpec("sdpa", {"any": window}), lay_out_trees(forest, CPU), [0, 9, 4], torch.half)
        assert (mask == 0).any(-1).all()


def test_layers_of_several_types_get_one_mask_each() -> None:
    layout = lay_out_chains([[1, 2, 3]], CPU)
    spec = AttentionSpec("sdpa", {"full_attention": None, "sliding_attention": 2})
    masks = mask_of(spec, layout, [4], torch.float32)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["full_attention"][0, 0] == 0, slow_mask(layout, [4], None))
    assert torch.equal(masks["sliding_attention"][0, 0] == 0, slow_mask(layout, [4], 2))


def test_flex_attention_gets_a_block_mask_of_the_same_pairs() -> None:
    layout = lay_out_trees([random_tree(random.Random(1), 7), random_tree(random.Random(2), 4)], CPU)
    spec, placed = AttentionSpec("flex_attention", {"any": None}), Padded(layout)
    mask = mask_of(spec, layout, [5, 2], torch.float32, placed)
    wanted = placed(slow_mask(layout, [5, 2], None))
    rows, queries, keys = wanted.shape
    assert mask.shape == (rows, 1, queries, keys)
    for row in range(rows):
        pairs = [[bool(mask.mask_mod(row, 0, q, k)) for k in range(keys)] for q in range(queries)]
        assert torch.equal(torch.tensor(pairs), wanted[row])


def model_with(config: Any, implementation: str | None = "sdpa") -> Any:
    config._attn_implementation = implementation
    return SimpleNamespace(config=config)


def test_the_specification_is_read_from_the_config() -> None:
    assert AttentionSpec.of(model_with(LlamaConfig())) == SDPA
    assert AttentionSpec.of(model_with(LlamaConfig(), "eager")).implementation == "eager"
    assert AttentionSpec.of(model_with(MistralConfig(sliding_window=7))).windows == {"sliding_attention": 7}
    assert AttentionSpec.of(model_with(MistralConfig(sliding_window=None))) == SDPA
    mixed = Gemma2Config(num_hidden_layers=4, sliding_window=9)
    assert AttentionSpec.of(model_with(mixed)).windows == {"sliding_attention": 9, "full_attention": None}


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "paged|sdpa", "kernels-community/x"])
def test_attention_without_tree_masks_is_refused_by_name(name: str) -> None:
    config = LlamaConfig()
    config._attn_implementation_internal = name  # the setter would look for the package
    with pytest.raises(UnsupportedModel, match=r"takes no tree mask.*sdpa") as caught:
        AttentionSpec.of(SimpleNamespace(config=config))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["chunked_attention"]},
        {"attention_layers": ["global", "local"]},
        {"layer_types": ["sliding_attention"], "sliding_window": None},
    ],
)
def test_layers_that_a_mask_cannot_describe_are_named(options: dict[str, Any]) -> None:
    config = LlamaConfig()
    for name, value in options.items():
        setattr(config, name, value)
    named = next(iter(options.values()))
    spec = AttentionSpec.of(model_with(config))
    assert spec.others == ((len(named) - 1, named[-1]),)
    assert list(spec.windows) == named[:-1]
