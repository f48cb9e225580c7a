"""Sessions: every node's logits equal a fresh pass over its path, after any history of commits.

The reference is the plain model on one unpadded path at a time; nothing of `check_model` is used.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config

import specinfer.attention.model as adapter
from specinfer.attention import Layout, TreeModel, TreeSession, lay_out_chains, lay_out_level
from specinfer.attention.layout import PerNode
from specinfer.errors import CacheError, UnsupportedModel
from specinfer.tree import Draw, Frontier, TokenTree

VOCAB = 96
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE: dict[str, Any] = {
    **SIZES,
    **TOKENS,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **TOKENS}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

# type, configuration, tolerance in float64 under sdpa: norms that compute in float32 anyway allow no more than 1e-6
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gpt2": ("gpt2", GPT, 1e-9),
    "gpt_neox": ("gpt_neox", BASE, 1e-9),
    "phi": ("phi", BASE, 1e-9),
    "llama": ("llama", BASE, 1e-6),
    "sliding": ("mistral", {**BASE, "sliding_window": 6}, 1e-6),
    "sliding, exact norms": ("starcoder2", {**BASE, "sliding_window": 6}, 1e-9),
    "mixed": ("gemma3_text", {**BASE, "head_dim": 8, **MIXED}, 1e-6),
}


def build(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa", **options: Any) -> Any:
    family, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**sizes, "initializer_range": 0.1, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def random_tree(chance: random.Random, root: int, drafted: int) -> TokenTree:
    parents = [chance.randrange(node + 1) for node in range(drafted)]
    tokens = chance.sample(range(VOCAB), drafted)
    scores = [-float(node + 1) for node in range(drafted)]
    return TokenTree.from_nodes(root, tokens, parents, scores, [[Draw(0, 0)]] * drafted)


@torch.inference_mode()
def plain(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits (V,) after a token list, in one pass without a cache."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def assert_nodes_match(
    model: Any, logits: PerNode, prefixes: Sequence[list[int]], trees: Sequence[TokenTree], tolerance: float
) -> None:
    for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        for node in range(len(tree)):
            wanted = plain(model, [*prefix, int(tree.tokens[0]), *tree.path(node)])
            error = float((logits.row(row)[node] - wanted).abs().max() / wanted.abs().max())
            assert error <= tolerance, f"row {row}, node {node}: {error:.1e}"


def tolerance_of(name: str, attention: str, dtype: torch.dtype = torch.float64) -> float:
    if dtype == torch.float32:
        return 1e-5
    in_float32 = attention == "eager" and name != "gpt2"  # the softmax of most eager attention
    return 1e-6 if in_float32 else MODELS[name][2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_rounds_of_score_and_commit(name: str, attention: str, dtype: torch.dtype) -> None:
    """Ragged rows, random trees, random kept paths, rows retired midway, capacity that doubles on the way."""
    chance, model = random.Random(3), build(name, dtype, attention)
    prefixes = [[chance.randrange(VOCAB) for _ in range(length)] for length in (9, 0, 4)]
    session = TreeModel(model).session(3, capacity=16, max_capacity=200)
    session.prefill(prefixes)
    for step in range(20):
        trees = [random_tree(chance, chance.randrange(VOCAB), chance.randrange(7)) for _ in prefixes]
        logits = session.score(trees)
        assert [tuple(row.shape) for row in logits] == [(len(tree), VOCAB) for tree in trees]
        if step % 4 == 0 or step > 16:
            assert_nodes_match(model, logits, prefixes, trees, tolerance_of(name, attention, dtype))
        paths: list[list[int] | None] = [tree.ancestors(chance.randrange(len(tree))) for tree in trees]
        if step in (6, 13):
            paths[chance.randrange(len(paths))] = None
        session.commit(paths)
        session.cache.check_integrity()
        rows = zip(prefixes, trees, paths, strict=True)
        prefixes = [p + tree.tokens[path].tolist() for p, tree, path in rows if path is not None]
        assert session.cache.lengths == list(map(len, prefixes))
    assert len(prefixes) == 1
    assert session.cache.capacity > 16
    assert session.passes == 20


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_chunked_prefill_equals_a_whole_one(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, model = random.Random(1), build(name, attention=attention)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (13, 1, 8, 4)]
    trees = [random_tree(chance, 5, size) for size in (6, 0, 3, 5)]
    scores = []
    for name_of, most, widest in (("PREFILL_CHUNK", 512, 13), ("PREFILL_CHUNK", 4, 4), ("PREFILL_TOKENS", 17, 4)):
        with monkeypatch.context() as patched:
            patched.setattr(adapter, name_of, most)
            session, widths = TreeModel(model).session(4, capacity=32), []
            hook = model.register_forward_pre_hook(
                lambda _, given, named, widths=widths: widths.append(named["input_ids"].shape[1]), with_kwargs=True
            )
            session.prefill(prompts)
            hook.remove()
        assert max(widths) == widest
        assert session.cache.lengths == [13, 1, 8, 4]
        assert session.passes == 0
        scores.append(session.score(trees))
        assert_nodes_match(model, scores[-1], prompts, trees, tolerance_of(name, attention))
    for other in scores[1:]:
        torch.testing.assert_close(scores[0].flat(), other.flat(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_end_of_a_prompt_may_be_read_with_the_first_trees(
    name: str, attention: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "PREFILL_CHUNK", chunk)
    chance, model = random.Random(7), build(name, attention=attention)
    prefixes = [[chance.randrange(VOCAB) for _ in range(length)] for length in (9, 0, 6, 5)]
    session = TreeModel(model).session(4, capacity=64)
    session.prefill(prefixes, hold=True)
    assert session.cache.lengths == ([0] * 4 if chunk > 9 else [8, 0, 6, 5])
    for step in range(3):
        trees = [random_tree(chance, 5, size) for size in (6, 0, 3, 5)[: len(prefixes)]]
        assert_nodes_match(model, session.score(trees), prefixes, trees, tolerance_of(name, attention))
        paths: list[list[int] | None] = [tree.ancestors(chance.randrange(len(tree))) for tree in trees]
        paths = [*paths[:-1], None]
        session.commit(paths)
        session.cache.check_integrity()
        rows = zip(prefixes, trees, paths, strict=True)
        prefixes = [prefix + tree.tokens[path].tolist() for prefix, tree, path in rows if path is not None]
        assert (session.cache.lengths, session.passes) == ([*map(len, prefixes)], step)  # the first one is a prefill


def test_a_prompt_of_one_token_has_an_empty_prefix() -> None:
    model = build("gpt2")
    session = TreeModel(model).session(1, capacity=16)
    session.prefill([[]])  # the only token is the root of the first tree
    assert (session.cache.lengths, session.passes) == ([0], 0)
    tree = random_tree(random.Random(0), 7, 6)
    assert_nodes_match(model, session.score([tree]), [[]], [tree], 1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "sliding, exact norms", "mixed"])
def test_a_tree_fed_level_by_level_scores_like_the_whole(name: str) -> None:
    """What a draft does: the root is committed, each level is appended as pending columns."""
    chance, model = random.Random(5), build(name)
    prefixes = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]
    trees = [random_tree(chance, 8, 7), random_tree(chance, 11, 4)]
    session = TreeModel(model).session(2, capacity=48)
    session.prefill([[*prefix, int(tree.tokens[0])] for prefix, tree in zip(prefixes, trees, strict=True)])
    layout: Layout | None = None
    sent, count = [{0: 0}, {0: 0}], 1
    for depth in range(1, max(tree.depth for tree in trees) + 1):
        rows = [[node for node in range(len(tree)) if tree.depths[node] == depth] for tree in trees]
        width = max(map(len, rows)) + 1
        padded = [[*row, *[None] * (width - len(row))] for row in rows]
        tokens = [[50 if n is None else int(t.tokens[n]) for n in r] for t, r in zip(trees, padded, strict=True)]
        parents = [
            [0 if n is None else index[int(t.parents[n])] for n in r]
            for t, r, index in zip(trees, padded, sent, strict=True)
        ]
        valid = [[n is not None for n in r] for r in padded]
        frontier = Frontier(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), depth)
        layout = lay_out_level(frontier, layout, session.model.device)
        logits = session.append(layout)
        for row, (prefix, tree, nodes) in enumerate(zip(prefixes, trees, rows, strict=True)):
            for place, node in enumerate(nodes):
                wanted = plain(model, [*prefix, int(tree.tokens[0]), *tree.path(node)])
                error = float((logits.row(row)[place] - wanted).abs().max() / wanted.abs().max())
                assert error <= MODELS[name][2]
                sent[row][node] = count + place
        count += width
    assert session.cache.pending == [count - 1] * 2


def test_rows_do_not_know_of_each_other() -> None:
    model, chance = TreeModel(build("gpt2")), random.Random(2)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (11, 2, 5)]
    trees = [random_tree(chance, 1, size) for size in (2, 8, 0)]
    batch = model.session(3, capacity=32)
    batch.prefill(prompts)
    together = batch.score(trees)
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        single = model.session(1, capacity=32)
        single.prefill([prompt])
        torch.testing.assert_close(single.score([tree]).row(0), together.row(row), rtol=1e-10, atol=1e-12)


class Reluctant(LlamaForCausalLM):
    """A llama whose forward knows no logits_to_keep."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return all logits."""
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


class Positionless(LlamaForCausalLM):
    """A llama whose forward knows no position_ids."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: Any = 0,
    ) -> Any:
        """Count positions from the longest row."""
        keep = {"use_cache": use_cache, "logits_to_keep": logits_to_keep}
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **keep)


def tiny(cls: type, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(LlamaConfig(**{**BASE, "initializer_range": 0.1, **options})).eval()


@pytest.mark.parametrize("cls", [LlamaForCausalLM, Reluctant])
def test_only_the_wanted_columns_come_back(cls: type) -> None:
    model = TreeModel(tiny(cls))
    assert model.takes_logits_to_keep is (cls is LlamaForCausalLM)
    chains, logits = [[5, 6, 7, 8], [9, 10]], []
    columns = [None, [range(2), range(2)], [range(3, 4), range(1, 2)], [range(1, 4), range(2)], [range(4), range(0)]]
    for wanted in columns:
        session = model.session(2, capacity=16)
        session.prefill([[1, 2, 3], [4]])
        logits.append(session.append(lay_out_chains(chains, model.device), wanted))
    assert [len(row) for row in logits[0]] == [4, 2]
    for wanted, found in zip(columns[1:], logits[1:], strict=True):
        for row, part in enumerate(wanted or ()):
            torch.testing.assert_close(found.row(row), logits[0].row(row)[part.start : part.stop])


def test_a_model_without_positions_still_scores_chains() -> None:
    model = tiny(Positionless)
    tree_model = TreeModel(model)
    assert not tree_model.takes_positions
    session = tree_model.session(1, capacity=16)
    session.prefill([[1, 2, 3]])
    logits = session.append(lay_out_chains([[4, 5, 6]], tree_model.device))
    for last in range(3):
        wanted = plain(model, [1, 2, 3, 4, 5, 6][: 4 + last])
        torch.testing.assert_close(logits.row(0)[last], wanted, rtol=1e-5, atol=1e-6)


def test_a_model_without_a_cache_is_refused() -> None:
    class Cacheless(LlamaForCausalLM):
        def forward(self, input_ids: Tensor) -> Any:
            return super().forward(input_ids)

    with pytest.raises(UnsupportedModel, match="offers no cache of its tokens"):
        TreeModel(tiny(Cacheless))


def test_the_model_and_its_configuration_are_untouched() -> None:
    model = build("mixed", attention="eager")
    config, names = model.config.to_dict(), dict(model.named_parameters()).keys()
    session = TreeModel(model).session(1, capacity=16)
    session.prefill([[1, 2, 3]])
    session.score([random_tree(random.Random(0), 4, 5)])
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "eager"
    assert dict(model.named_parameters()).keys() == names
    assert not model.training
    assert not any(parameter.requires_grad is False for parameter in model.parameters())


def test_a_pass_beyond_the_capacity_changes_nothing() -> None:
    model = build("gpt2")
    session = TreeModel(model).session(1, capacity=8)
    session.prefill([[1, 2, 3, 4]])
    tree = random_tree(random.Random(0), 5, 3)
    with pytest.raises(CacheError, match="smaller tree"):
        session.score([random_tree(random.Random(0), 5, 4)])
    assert (session.cache.pending, session.passes) == ([0], 0)
    assert_nodes_match(model, session.score([tree]), [[1, 2, 3, 4]], [tree], 1e-9)


def test_the_last_positions_of_the_context_are_exact_beside_padding() -> None:
    model = build("gpt2", n_positions=16)
    tree_model = TreeModel(model)
    assert tree_model.position_limit() == 16
    prefixes = [list(range(14)), [3]]
    trees = [random_tree(random.Random(0), 5, 1), random_tree(random.Random(0), 6, 6)]
    session = tree_model.session(2, capacity=32)
    session.prefill(prefixes)
    assert_nodes_match(model, session.score(trees), prefixes, trees, 1e-9)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("rope", "trees", "draft", "setting"),
    [
        ({"rope_type": "default"}, 256, 256, "max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0}, 512, 512, "max_position_embeddings=256, extended by rope_type=linear"),
        ({"rope_type": "linear", "factor": float("inf")}, 256, 256, "max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 256}, 1024, 1024, "extended by rope_type=yarn with factor=4"),
        ({"rope_type": "yarn", "factor": 4.0}, 1024, 1024, "rope_type=yarn"),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}, 256, 256, "max_position_embeddings"),  # set to the product
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3, ORIGINAL: 32}, 256, 256, "max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3, ORIGINAL: 256}, 2048, 2048, "rope_type=llama3"),
        # max_position_embeddings is the original context of dynamic scaling
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512, "dynamic rotary embeddings change with the longest row"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, ORIGINAL: 32},
            32,
            256,
            ORIGINAL,
        ),
    ],
)
def test_position_limit_of_rotary_embeddings(rope: dict[str, Any], trees: int, draft: int, setting: str) -> None:
    """How many positions trees have, and drafts, which need not be exact; and the setting that says so."""
    model = TreeModel(tiny(LlamaForCausalLM, rope_parameters={**rope, "rope_theta": 1e4}))
    assert (model.position_limit(), model.max_positions) == (trees, draft)
    assert setting in model.context.setting


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("given", ["64", [64], -64, float("inf")])
def test_an_original_context_that_is_no_size_is_refused(kind: str, given: object) -> None:
    rope = {"rope_type": kind, "factor": 2.0, ORIGINAL: given, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match=f"{ORIGINAL} is .*, and must be a number above 0"):
        TreeModel(tiny(LlamaForCausalLM, rope_parameters=rope))


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}])
def test_extended_contexts_are_exact_beyond_the_original_one(rope: dict[str, Any]) -> None:
    model = tiny(LlamaForCausalLM, rope_parameters={**rope, "rope_theta": 1e4}, max_position_embeddings=16).double()
    prefixes = [list(range(40)), [3]]
    trees = [random_tree(random.Random(0), 5, 5), random_tree(random.Random(0), 6, 6)]
    session = TreeModel(model).session(2, capacity=64)
    session.prefill(prefixes)
    assert_nodes_match(model, session.score(trees), prefixes, trees, 1e-9)


@pytest.mark.parametrize(
    ("family", "sizes", "limit"),
    [
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, 64),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, None),
    ],
)
def test_position_limit_without_position_ids(family: str, sizes: dict[str, int], limit: int | None) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=VOCAB, **sizes))
    assert TreeModel(model).position_limit() == limit


def longrope() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**BASE, "original_max_position_embeddings": 32, "initializer_range": 0.3}
    config = Phi3Config(**sizes, rope_parameters={**rope, "original_max_position_embeddings": 32})
    return AutoModelForCausalLM.from_config(config).eval()


def test_longrope_is_exact_up_to_its_original_context_only() -> None:
    """One position beyond it changes every frequency of the pass: the reason for the limit."""
    model = longrope()
    tree_model = TreeModel(model)
    assert tree_model.position_limit() == 32
    chain = TokenTree.from_nodes(5, [6, 7], [0, 1], [-1.0, -2.0], [[Draw(0, 0)]] * 2)
    errors = []
    for length in (29, 30):  # the chain's last token is at position 31, then at 32
        session = tree_model.session(1, capacity=48)
        session.prefill([list(range(length))])
        root = plain(model, [*range(length), 5])
        errors.append(float((session.score([chain]).row(0)[0] - root).abs().max()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-3


def test_limits_named_per_layer_type_count() -> None:
    model = build("mixed")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48}
    model.config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert TreeModel(model).position_limit() == 48


def test_flex_attention_scores_trees() -> None:
    """One pass of one layer: on a CPU every new shape is compiled, which takes seconds."""
    pytest.importorskip("torch.nn.attention.flex_attention")
    trees = [random_tree(random.Random(0), 1, 5), random_tree(random.Random(1), 2, 2)]
    model = build("llama", torch.float32, "flex_attention", num_hidden_layers=1)
    session: TreeSession = TreeModel(model).session(2, capacity=16)
    try:
        logits = session.score(trees)
    except Exception as error:
        pytest.skip(f"flex attention does not compile here: {str(error).splitlines()[0]}")
    reference = build("llama", torch.float32, "eager", num_hidden_layers=1)
    assert_nodes_match(reference, logits, [[], []], trees, 1e-5)


def test_weights_on_several_devices_are_refused() -> None:
    """A model spread over devices is refused by name: its cache would have to follow it."""
    model = tiny(LlamaForCausalLM, tie_word_embeddings=False)
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match="spread over cpu, meta"):
        TreeModel(model)
