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

from specinfer.attention import AttentionSpec, Layout, attention_mask, lay_out_chains, lay_out_level, lay_out_trees
from specinfer.attention.layout import lay_out_behind
from specinfer.attention.packing import Packing
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


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_nodes_are_those_of_the_rows(sizes: list[int], columns: int) -> None:
    """Side by side, row after row, without padding; and back.  A row without nodes keeps one."""
    sizes = [*sizes, 5]
    layout = lay_out_chains([range(1, size + 1) for size in sizes], CPU)
    packing = Packing(layout)
    counts = [max(1, size) for size in sizes]
    nodes = [(row, column) for row, count in enumerate(counts) for column in range(count)]
    every = torch.arange(len(sizes) * 5).view(len(sizes), 5)
    packed = packing.pack(every)
    assert packed.tolist() == [[5 * row + column for row, column in nodes]]
    assert packing.rows.tolist() == [[row for row, _ in nodes]]
    back = packing.by_row(packed)
    assert [row.tolist() for row in back] == [row[:n].tolist() for row, n in zip(every, counts, strict=True)]
    wanted = [range(columns)] * len(sizes)
    found = packing.by_row(packed[:, packing.nodes(wanted)], wanted).padded().tolist()
    assert found == [[5 * row + min(column, n - 1) for column in range(columns)] for row, n in enumerate(counts)]


def test_the_inputs_of_a_packed_pass() -> None:
    """Masks of several kinds, positions and slots lose padding as tokens do; without padding nothing is copied."""
    layout = lay_out_chains([[7, 8, 9], [5]], CPU)
    mask, slots = torch.rand(2, 1, 3, 4), torch.tensor([[4, 5, 6], [1, 2, 3]])
    given = {"input_ids": layout.tokens, "attention_mask": {"a": mask, "b": -mask}}
    packing = Packing(layout)
    packed = packing.inputs(given, slots)
    assert packed["input_ids"].tolist() == [[7, 8, 9, 5]]
    assert packed["cache_rows"].tolist() == [[0, 0, 0, 1]]
    assert packed["cache_slots"].tolist() == [[4, 5, 6, 1]]
    assert packing.nodes(None) is None
    assert packing.nodes([range(1), range(1)]) == [0, 3]
    assert packing.nodes([range(1, 3), range(1, 3)]) == [1, 2, 3, 3]
    assert packing.nodes([range(1, 3), range(1)]) == [1, 2, 3]
    assert torch.equal(packed["attention_mask"]["b"][0, 0], -torch.cat([mask[0, 0], mask[1, 0, :1]]))
    whole = lay_out_chains([[7, 8], [5, 6]], CPU)
    assert (
        Packing(whole).inputs({"input_ids": whole.tokens, "attention_mask": mask}, slots)["input_ids"].data_ptr()
        == whole.tokens.data_ptr()
    )


@settings(deadline=None)
@given(forests())
def test_trees_see_their_transitive_closure_and_padding_itself(forest: list[TokenTree]) -> None:
    layout = lay_out_trees(forest, CPU)
    width = max(map(len, forest))
    assert layout.width == width
    assert layout.visible.shape == (len(forest), width, width)
    for row, tree in enumerate(forest):
        size = len(tree)
        assert layout.tokens[row].tolist() == tree.tokens.tolist() + [0] * (width - size)
        assert layout.depths[row].tolist() == tree.depths.tolist() + [0] * (width - size)
        wanted = closure(tree) + [{pad} for pad in range(size, width)]
        assert [columns_seen(line) for line in layout.visible[row]] == wanted


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=3).filter(any))
def test_chains_see_what_came_before_and_padding_itself(chains: list[list[int]]) -> None:
    layout = lay_out_chains(chains, CPU)
    width = max(map(len, chains))
    for row, chain in enumerate(chains):
        padding = width - len(chain)
        assert layout.tokens[row].tolist() == chain + [0] * padding
        assert layout.depths[row].tolist() == [*range(len(chain)), *[0] * padding]
        wanted = [set(range(t + 1)) for t in range(len(chain))] + [{t} for t in range(len(chain), width)]
        assert [columns_seen(line) for line in layout.visible[row]] == wanted


@settings(deadline=None)
@given(forests(), st.booleans(), st.data())
def test_trees_behind_chains_see_them(forest: list[TokenTree], aligned: bool, data: st.DataObject) -> None:
    """And nothing else sees a chain, and nothing sees padding."""
    chains = [data.draw(st.lists(st.integers(0, 99), max_size=6)) for _ in forest]
    layout, read = lay_out_behind(chains, forest, CPU, aligned)
    longest, starts = max(map(len, chains)), set()
    assert layout.sizes == (() if aligned else tuple(len(c) + len(t) for c, t in zip(chains, forest, strict=True)))
    for row, (chain, tree) in enumerate(zip(chains, forest, strict=True)):
        first = longest - len(chain) if aligned else 0
        start = first + len(chain)
        assert read[row] == range(first, start)
        starts.add(start)
        tokens, depths = [*chain, *tree.tokens.tolist()], [*range(len(chain)), *(tree.depths + len(chain)).tolist()]
        padding = layout.width - first - len(tokens)
        assert layout.tokens[row].tolist() == [0] * first + tokens + [0] * padding
        assert layout.depths[row].tolist() == [0] * first + depths + [0] * padding
        wanted = [{column} for column in range(layout.width)]
        wanted[first:start] = [{*range(first, column + 1)} for column in range(first, start)]
        wanted[start : start + len(tree)] = [
            {*range(first, start)} | {start + n for n in seen} for seen in closure(tree)
        ]
        assert [columns_seen(line) for line in layout.visible[row]] == wanted
    assert not aligned or len(starts) == 1


def test_a_chain_is_the_tree_of_one_branch() -> None:
    chain = [7, 8, 9, 3]
    tree = TokenTree.from_nodes(7, chain[1:], [0, 1, 2], [-1.0, -2.0, -3.0], [[Draw(0, 0)]] * 3)
    *tensors, sizes = lay_out_chains([chain], CPU)
    *others, other_sizes = lay_out_trees([tree], CPU)
    assert sizes == other_sizes == (4,)
    for a, b in zip(tensors, others, strict=True):
        assert torch.equal(a, b)


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
    level: Layout | None = None
    columns: list[list[int | None]] = [[] for _ in forest]  # the node in each pending column
    for frontier, places in levels(forest, chance):
        level = lay_out_level(frontier, level, CPU)
        columns = [old + new for old, new in zip(columns, places, strict=True)]
        assert level.depths.shape == (len(forest), len(columns[0]))
        for row, (tree, nodes) in enumerate(zip(forest, columns, strict=True)):
            first = len(nodes) - level.width
            for place, node in enumerate(nodes[first:]):
                seen = columns_seen(level.visible[row, place])
                if node is None:
                    assert seen == {first + place}
                    assert level.tokens[row, place] == 0
                    continue
                ancestors = {nodes[column] for column in seen} | {0}  # the root is committed
                assert ancestors == columns_seen(whole.visible[row, node])
                assert len(seen) == tree.depths[node]
                assert level.tokens[row, place] == whole.tokens[row, node]
            # positions count from the committed length, and the root is committed before growth starts
            wanted = [0 if node is None else int(whole.depths[row, node]) - 1 for node in nodes]
            assert level.depths[row].tolist() == wanted


def slow_mask(layout: Layout, lengths: Sequence[int], window: int | None) -> Tensor:
    """Decide for each row, node and cache column on its own whether one attends to the other."""
    rows, width, pending = layout.visible.shape
    mask = torch.zeros(rows, width, max(lengths) + pending, dtype=torch.bool)
    for row, length in enumerate(lengths):
        positions = [*range(length), *(length + layout.depths[row]).tolist()]
        for node in range(width):
            here = positions[length + pending - width + node]
            for column, there in enumerate(positions):
                related = column < length or bool(layout.visible[row, node, column - length])
                mask[row, node, column] = related and (window is None or here - there < window)
    return mask


@settings(deadline=None, max_examples=60)
@given(forests(), st.data(), st.sampled_from([None, 1, 2, 4, 9]))
def test_masks_equal_a_decision_per_pair(forest: list[TokenTree], data: st.DataObject, window: int | None) -> None:
    layout = lay_out_trees(forest, CPU)
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=len(forest), max_size=len(forest)))
    wanted = slow_mask(layout, lengths, window)
    name = "full_attention" if window is None else "sliding_attention"
    for implementation, dtype in product(("sdpa", "eager"), (torch.float32, torch.bfloat16, torch.float64)):
        added = attention_mask(AttentionSpec(implementation, {name: window}), layout, lengths, dtype)
        assert added.dtype == dtype
        assert added.shape == (len(forest), 1, layout.width, max(lengths) + layout.width)
        assert torch.equal(added[:, 0] == 0, wanted)
        assert (added[:, 0][~wanted] == torch.finfo(dtype).min).all()


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
        mask = attention_mask(AttentionSpec("sdpa", {"any": window}), level, lengths, torch.float32)
        assert torch.equal(mask[:, 0] == 0, slow_mask(level, lengths, window))


def test_a_window_counts_positions_and_not_columns() -> None:
    # root 1, its children 2 and 3, and 4 under 3: node 4 is in the fourth column but at the third position
    draws = [[Draw(0, 0)], [Draw(0, 1)], [Draw(0, 0)]]
    tree = TokenTree.from_nodes(1, [2, 3, 4], [0, 0, 2], [-1.0, -2.0, -3.0], draws)
    spec = AttentionSpec("sdpa", {"sliding_attention": 3})
    mask = attention_mask(spec, lay_out_trees([tree], CPU), [2], torch.float32)
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
        mask = attention_mask(AttentionSpec("sdpa", {"any": window}), lay_out_trees(forest, CPU), [0, 9, 4], torch.half)
        assert (mask == 0).any(-1).all()


def test_layers_of_several_types_get_one_mask_each() -> None:
    layout = lay_out_chains([[1, 2, 3]], CPU)
    spec = AttentionSpec("sdpa", {"full_attention": None, "sliding_attention": 2})
    masks = attention_mask(spec, layout, [4], torch.float32)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["full_attention"][:, 0] == 0, slow_mask(layout, [4], None))
    assert torch.equal(masks["sliding_attention"][:, 0] == 0, slow_mask(layout, [4], 2))


def test_flex_attention_gets_a_block_mask_of_the_same_pairs() -> None:
    layout = lay_out_trees([random_tree(random.Random(1), 7), random_tree(random.Random(2), 4)], CPU)
    mask = attention_mask(AttentionSpec("flex_attention", {"any": None}), layout, [5, 2], torch.float32)
    wanted = slow_mask(layout, [5, 2], None)
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
