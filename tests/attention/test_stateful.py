"""Models with recurrent or convolutional layers: verified as chains, exactly, or refused with the reason.

Nothing is downloaded: every model is built from a configuration with few layers and random weights.
"""

from collections.abc import Iterator
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import VOCAB, byte_tokenizer, oracle, plain, tiny_llama
from test_heads import draft_for
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import specinfer.attention.check as checking
import specinfer.attention.passes.stateful as recurrent
from specinfer import BestFirst, Chain, ModelDraft, SpeculativeDecoder, custom_generate, inspect
from specinfer.attention import Support, TreeModel, check_model, running
from specinfer.attention.check import toy_tree
from specinfer.attention.forward import cache_name
from specinfer.attention.passes.stateful import REPLAY
from specinfer.errors import CacheError, InputError, UnsupportedModel

VOCABULARY = 48
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BASE: dict[str, Any] = {
    **SIZES,
    **TOKENS,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that tokens depend on states
}
HEAD = {"head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
LOCAL_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KIMI = {"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
MAMBA2 = {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 1}
ZAMBA = {"mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "use_mem_rope": True}
ATTENTION = {"layer_types": ["mamba", "attention"]}
GRANITE = {**ATTENTION, **LOCAL_MOE, "shared_intermediate_size": 16}

# transformers' model type -> its configuration, and the layers that the check names
CHAINS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({**BASE, **HEAD, **MOE, **SHARED, **LINEAR, **DELTA}, "layer 0 (linear_attention)"),
    "qwen3_5_text": ({**BASE, **HEAD, **LINEAR, **DELTA}, "layer 0 (linear_attention)"),
    "qwen3_5_moe_text": ({**BASE, **HEAD, **MOE, **SHARED, **LINEAR, **DELTA}, "layer 0 (linear_attention)"),
    "olmo_hybrid": ({**BASE, **LINEAR, **DELTA}, "layer 0 (linear_attention)"),
    "kimi_linear": ({**BASE, **MOE, **LINEAR, **KIMI, **LATENT}, "layer 0 (linear_attention)"),
    "mamba2": ({**SIZES, **TOKENS, **MAMBA2, "initializer_range": 0.3}, "layers 0, 1 (linear_attention)"),
    "bamba": ({**BASE, **MAMBA, "attn_layer_indices": [1]}, "layer 0 (linear_attention)"),
    "falcon_h1": ({**BASE, **MAMBA, "mamba_d_ssm": 64}, "layers 0, 1 (hybrid)"),
    "granitemoehybrid": ({**BASE, **MAMBA, **GRANITE}, "layer 0 (linear_attention)"),
    "nemotron_h": (
        {**BASE, **HEAD, **NEMOTRON, "layers_block_type": ["mamba", "attention"], "initializer_range": 0.1},
        "layer 0 (linear_attention)",
    ),
    "zamba2": (
        {**BASE, **ZAMBA, "num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
        | {"initializer_range": 0.1},
        "layers 0, 1, 2 (linear_attention, hybrid)",
    ),
    "lfm2": ({**BASE, **CONV}, "layer 0 (conv)"),
    "lfm2_moe": ({**BASE, **MOE, **CONV, "num_dense_layers": 1}, "layer 0 (conv)"),
    "lfm3": (
        {**BASE, "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]}
        | {"sliding_window": 5},
        "layer 0 (conv)",
    ),
    "zaya": (BASE, "layers 0, 1 (hybrid)"),
    "rwkv": ({**SIZES, **TOKENS, "attention_hidden_size": 32}, "its layers"),
    # these mask tokens in a way of their own
    "llama4_text": (
        {**BASE, **HEAD, "num_local_experts": 2, "attention_chunk_size": 8},
        "layers 0, 1 (chunked_attention)",
    ),
    "gpt_neo": (
        {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8}
        | {"max_position_embeddings": 256, "attention_types": [[["global", "local"], 1]], "initializer_range": 0.3},
        "layer 1 (local)",
    ),
}
ONE_TOKEN = "continue a state by one token only"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({**SIZES, "state_size": 4}, ONE_TOKEN),
    "falcon_mamba": ({**SIZES, "state_size": 4}, ONE_TOKEN),
    "jamba": ({**BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, ONE_TOKEN),
    "zamba": (
        {**BASE, "num_hidden_layers": 4, "n_mamba_heads": 2, "mamba_d_state": 4}
        | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
        ONE_TOKEN,
    ),
    "minimax": ({**BASE, **HEAD, **LINEAR, **LOCAL_MOE}, "even a chain is off"),
    "recurrent_gemma": (
        {**BASE, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        "keeps its states in its modules",
    ),
}
PROMPTS = [[5, 9, 3, 5, 9, 3, 5, 9], [7, 2, 40], [11, 30, 8, 22, 17]]
NEW = 24


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {name}")
    sizes = (CHAINS.get(name) or REFUSED[name])[0]
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **{**sizes, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def near(model: Any, noise: float) -> ModelDraft:
    """Return a perturbed copy, which is right sometimes."""
    twin = deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.ndim > 1:
                weight.add_(noise * weight.std() * torch.randn_like(weight))
    return ModelDraft(twin, name="near")


@pytest.fixture(scope="module", params=CHAINS)
def pair(request: pytest.FixtureRequest) -> tuple[str, Any, ModelDraft]:
    model = build(request.param)
    return request.param, model, near(model, 0.05)


@pytest.fixture(scope="module")
def greedy(pair: tuple[str, Any, ModelDraft]) -> list[int]:
    """The text of `generate`."""
    return plain(pair[1], PROMPTS[0], NEW)


def test_the_check_says_chain_only_and_why(pair: tuple[str, Any, ModelDraft]) -> None:
    name, model, _ = pair
    check = check_model(model)
    assert check.support is Support.CHAIN_ONLY, check.reason
    assert f"a token cannot have siblings in {CHAINS[name][1]}: " in check.reason
    assert check.error < 1e-4


def test_greedy_text_is_that_of_generate(pair: tuple[str, Any, ModelDraft], greedy: list[int]) -> None:
    """With a draft that is right sometimes: after partial and after full acceptance, and after neither."""
    _, model, draft = pair
    result = SpeculativeDecoder(model, drafts=[draft], tree=Chain(4)).generate(PROMPTS[0], max_new_tokens=NEW)
    assert result.token_ids == greedy
    assert len(set(result.token_ids)) > 3
    kept = [len(step.path) for step in result.steps if len(step.tree) > 1]
    drafted = [len(step.tree) - 1 for step in result.steps if len(step.tree) > 1]
    assert 0 < sum(kept) < sum(drafted)


def test_n_grams_and_auto_do_not_change_the_text(pair: tuple[str, Any, ModelDraft], greedy: list[int]) -> None:
    """Nor does decoding without drafts; each family meets one of these."""
    name, model, _ = pair
    drafts, tree = ((["ngram"], Chain(3)), ("auto", "auto"), ([], None))[[*CHAINS].index(name) % 3]
    result = SpeculativeDecoder(model, drafts=drafts, tree=tree).generate(PROMPTS[0], max_new_tokens=NEW)
    assert result.token_ids == greedy


def test_sampled_text_is_the_same_without_speculation_and_in_a_batch(pair: tuple[str, Any, ModelDraft]) -> None:
    _, model, draft = pair
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.8}
    without = SpeculativeDecoder(model, drafts=[], tree=None)
    decoder = SpeculativeDecoder(model, drafts=[draft], tree=Chain(3))
    alone = [without.generate(prompt, seed=seed, **options).token_ids for seed, prompt in enumerate(PROMPTS)]
    batch = decoder.generate(PROMPTS, seed=range(len(PROMPTS)), **options)
    assert [result.token_ids for result in batch] == alone
    assert sum(len(step.path) for result in batch for step in result.steps) > 0


def test_a_ragged_batch_is_its_rows(pair: tuple[str, Any, ModelDraft], greedy: list[int]) -> None:
    """Rows end at different steps."""
    _, model, draft = pair
    decoder = SpeculativeDecoder(model, drafts=[draft], tree=Chain(4))
    lengths = [NEW, 5, 13]
    batch = decoder.generate(PROMPTS, max_new_tokens=lengths)
    wanted = [plain(model, prompt, new) for prompt, new in zip(PROMPTS[1:], lengths[1:], strict=True)]
    assert [result.token_ids for result in batch] == [greedy, *wanted]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_cannot_continue_several_tokens_are_refused_and_told_why(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    check = check_model(model)
    assert check.support is Support.UNSUPPORTED
    assert REFUSED[name][1] in check.reason
    with pytest.raises(UnsupportedModel, match=REFUSED[name][1]):
        SpeculativeDecoder(model, drafts=["ngram"])


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2"])
def test_sixteen_bits_are_chains_up_to_rounding(name: str) -> None:
    check = check_model(build(name, torch.bfloat16))
    assert check.support is Support.CHAIN_ONLY, check.reason


# ---- states in modules ----


def in_an_attribute(module: Any, states: Tensor) -> Tensor:
    before, module.state = getattr(module, "state", states), states
    return before


def in_a_list(module: Any, states: Tensor) -> Tensor:
    module.state = [*getattr(module, "state", [states])[-1:], states]
    return module.state[0]


def in_a_buffer(module: Any, states: Tensor) -> Tensor:
    if not hasattr(module, "state"):
        module.register_buffer("state", states.clone())
    before = module.state.clone()
    module.state.copy_(states)
    return before


def in_an_object(module: Any, states: Tensor) -> Tensor:
    before = getattr(module, "state", SimpleNamespace(last=states)).last
    module.state = SimpleNamespace(last=states)
    return before


@pytest.mark.parametrize(("keep", "share"), [
    (in_an_attribute, 0.01),
    (in_a_list, 0.01),
    (in_a_buffer, 0.01),
    (in_an_object, 0.1),  # which only the logits show
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_modules_are_refused_even_where_rounding_would_hide_them(
    keep: Any, share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over one token continues what was read last, by whichever row; the cache is complete otherwise."""

    def remember(module: Any, given: Any, output: Tensor) -> Tensor:
        before = keep(module, output[:, -1:].mean(0))
        return output + share * before if output.shape[1] == 1 else output

    model = tiny_llama(3, VOCABULARY).to(dtype)
    model.model.layers[0].mlp.register_forward_hook(remember)
    check = check_model(model)
    assert check.support is Support.UNSUPPORTED
    assert check.reason == "it keeps its states in its modules, where nothing can be taken back"
    monkeypatch.setattr(checking, "_remembers", lambda model, tolerance: False)
    hidden = dtype == torch.bfloat16
    assert (check_model(model).support is not Support.UNSUPPORTED) == hidden


def counts(module: Any, output: Tensor) -> Tensor:
    """Count, as experts do."""
    module.count = getattr(module, "count", 0) + output.sum((0, 1))
    return output


def adapts_to_the_length(module: Any, output: Tensor) -> Tensor:
    """Make a table again for each length, as rotary frequencies are."""
    module.table = torch.arange(output.shape[1], dtype=output.dtype)[:, None] * 0
    return output + module.table


def differs_in_the_last_bits(module: Any, output: Tensor) -> Tensor:
    """Round otherwise in each pass, as kernels that add in any order."""
    module.order = -getattr(module, "order", 1)
    return output * (1 + 1e-6 * module.order)


@pytest.mark.parametrize("harmless", [counts, adapts_to_the_length, differs_in_the_last_bits])
def test_other_tensors_in_modules_are_no_states(harmless: Any) -> None:
    model = tiny_llama(3, VOCABULARY).float()
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: harmless(module, output))
    check = check_model(model)
    assert check.support is Support.EXACT, check.reason


def test_a_model_that_returns_no_cache_is_told_so() -> None:
    model = build("lfm2")
    forward = model.forward

    def without_cache(**inputs: Any) -> Any:
        output = forward(**inputs)
        output[cache_name(forward)] = None
        return output

    model.forward = without_cache
    model.forward.__signature__ = signature(forward)
    check = check_model(model)
    assert check.support is Support.UNSUPPORTED
    assert "Lfm2ForCausalLM returns no cache of what it read" in check.reason


# ---- the states themselves ----


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return build("qwen3_5_text")


def logits_after(model: Any, ids: list[int], count: int) -> Tensor:
    """Return the logits of the last tokens in a plain pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -count:]


def test_logits_and_hidden_states_after_any_acceptance_are_those_of_a_plain_pass(pair: tuple[str, Any, Any]) -> None:
    """Nothing, some, all kept; rows of different lengths, one of which retires; several passes between commits."""
    _, model, _ = pair
    tree_model, ids = TreeModel(model), torch.randint(VOCABULARY, (3, 60)).tolist()
    rows, fresh = [row[:length] for row, length in zip(ids, (9, 1, 5), strict=True)], 10
    with running(tree_model):
        session = tree_model.session(3, 80, aux_layers=[1])
        session.prefill(rows)
        for kept in ((0, 3, 4), (2, 1, 4), (4, 4, None), (1, 3), (2, 4), (4, 4)):
            trees = [toy_tree(row[fresh : fresh + 4], (0, 1, 2)) for row in ids[: len(kept)]]
            found = session.score(trees)
            for row, tree, logits, states in zip(rows, trees, found, session.aux_states[0], strict=True):
                full = torch.tensor([[*row, *tree.tokens.tolist()]])
                wanted = model(input_ids=full, use_cache=False, output_hidden_states=True)
                torch.testing.assert_close(logits, wanted.logits[0, -4:], atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(states[:, 0], wanted.hidden_states[1][0, -4:], atol=1e-4, rtol=1e-3)
            session.commit([None if count is None else range(count) for count in kept])
            session.cache.check_integrity()
            rows = [
                [*row, *t.tokens[:n].tolist()] for row, t, n in zip(rows, trees, kept, strict=True) if n is not None
            ]
            assert session.cache.lengths == list(map(len, rows))
            fresh += 4


@pytest.fixture
def widths(hybrid: Any) -> Iterator[list[int]]:
    """The tokens that each pass of the hybrid reads."""
    check_model(hybrid)
    read: list[int] = []
    call = TreeModel.call

    def recording(model: TreeModel, inputs: dict[str, Any], aux_layers: Any) -> Any:
        read.append(inputs["input_ids"].shape[1])
        return call(model, inputs, aux_layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeModel, "call", recording)
        yield read


def test_what_was_accepted_is_read_again_with_the_next_chain(hybrid: Any, widths: list[int]) -> None:
    """So rejections cost no pass, until as many tokens were accepted as one pass reads again."""
    steps = 2 * (REPLAY + 1) + 5
    decoder = SpeculativeDecoder(hybrid, drafts=[oracle(hybrid, wrong=True)], tree=Chain(2))
    widths.clear()
    result = decoder.generate(PROMPTS[2], max_new_tokens=steps)
    assert result.token_ids == plain(hybrid, PROMPTS[2], steps)
    assert [len(step.path) for step in result.steps] == [0] * steps
    chains = [3] * (steps - 2) + [2, 1]  # where few tokens may follow, chains are short
    replays = [step % (REPLAY + 1) for step in range(steps)]
    expected = [len(PROMPTS[2]) - 1]
    for step, (chain, replay) in enumerate(zip(chains, replays, strict=True)):
        expected += [REPLAY + 1] if step and not replay else []
        expected.append(replay + chain)
    assert widths == expected


def test_where_all_is_accepted_nothing_is_read_again(hybrid: Any, widths: list[int]) -> None:
    decoder = SpeculativeDecoder(hybrid, drafts=[oracle(hybrid)], tree=Chain(4))
    widths.clear()
    decoder.generate(PROMPTS[2], max_new_tokens=20)
    assert widths == [len(PROMPTS[2]) - 1, *[5] * 4]


def shared(value: Any, name: str = "") -> Any:
    """Copy nothing."""
    return value


def forgetful(row: Any, count: int) -> None:
    """Roll back, and do not replay."""
    if row.boundary and count < len(row.fed):
        row.cache, row.length = row.boundary
    row.boundary, row.fed = None, []


def hopeful(row: Any, count: int) -> None:
    """Take what was rejected for accepted."""
    row.boundary, row.fed = None, []


@pytest.mark.parametrize(("place", "name", "broken"), [
    (recurrent, "copied", shared),
    (recurrent._Row, "keep", forgetful),
    (recurrent._Row, "keep", hopeful),
])  # fmt: skip
def test_a_broken_replay_is_noticed(place: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, broken)
    check = check_model(build("qwen3_5_text"))
    assert check.support is Support.UNSUPPORTED, check.reason


def test_logits_alone_would_not_show_a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zamba's logits hardly depend on its states while its weights are small."""
    model = build("zamba", initializer_range=0.02)
    assert ONE_TOKEN in check_model(model).reason
    monkeypatch.setattr(checking, "_state_error", lambda model: 0.0)
    assert check_model(model).support is Support.CHAIN_ONLY


def test_branches_and_gaps_are_refused(hybrid: Any) -> None:
    model = TreeModel(hybrid)
    with running(model):
        session = model.session(1, 12)
        session.prefill([[1, 2, 3]])
        with pytest.raises(CacheError, match="branches"):
            session.score([toy_tree([4, 5, 6], (0, 0))])
        session.score([toy_tree([4, 5, 6], (0, 1))])
        with pytest.raises(CacheError, match="does not begin a chain of 3 tokens"):
            session.commit([(0, 2)])
        with pytest.raises(CacheError, match="1 rows"):
            session.commit([(0,), (0,)])
        session.commit([(0, 1)])
        with pytest.raises(CacheError, match="maximum of 12 tokens"):
            session.score([toy_tree(list(range(8)), tuple(range(7)))])


# ---- in the decoder ----


def test_a_tree_becomes_a_chain_with_a_note(hybrid: Any) -> None:
    decoder = SpeculativeDecoder(hybrid, drafts=["suffix"], tree=BestFirst(16, 6))
    assert decoder.policy == Chain(6)
    assert any("can score chains only (a token cannot have siblings in layer 0" in note for note in decoder.notes)
    with pytest.raises(UnsupportedModel, match="use one draft"):
        SpeculativeDecoder(hybrid, drafts=["suffix", "ngram"])


def test_a_hybrid_draft_serves_an_attention_target() -> None:
    target = tiny_llama(3, VOCABULARY).float()
    draft = ModelDraft(build("lfm2"))
    batch = SpeculativeDecoder(target, drafts=[draft], tree=Chain(3)).generate(PROMPTS, max_new_tokens=NEW)
    assert [result.token_ids for result in batch] == [plain(target, prompt, NEW) for prompt in PROMPTS]
    assert all(len(step.tree) > 1 for result in batch for step in result.steps[:-1])


def test_a_hybrid_draft_with_another_tokenizer_is_refused() -> None:
    """It would have to take back committed tokens, when more text changes how they are cut."""
    target, tokenizer = tiny_llama(0, 300), byte_tokenizer()
    draft = ModelDraft(build("lfm2", vocab_size=300), byte_tokenizer(eos_token="<end>"), "other")
    with pytest.raises(UnsupportedModel, match=r"draft other has another tokenizer.*cannot have siblings in layer 0"):
        SpeculativeDecoder(target, tokenizer, drafts=[draft])


def test_streams_and_transformers_own_call(hybrid: Any) -> None:
    decoder = SpeculativeDecoder(hybrid, drafts=["suffix"])
    wanted = plain(hybrid, PROMPTS[0], NEW)
    assert [
        t for emitted in decoder.open(PROMPTS[0], max_new_tokens=NEW) for _, step in emitted for t in step.tokens
    ] == wanted
    for model in (hybrid, build("mamba2")):
        ids = torch.tensor(PROMPTS[:1])
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        found = model.generate(ids, **options, custom_generate=custom_generate)
        assert found.tolist() == model.generate(ids, **options).tolist()


def test_a_prompt_longer_than_a_chunk_is_read_in_chunks(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.attention.model.PREFILL_CHUNK", 7)
    prompts = [[(7 * i + row) % VOCABULARY for i in range(length)] for row, length in enumerate((40, 3, 18))]
    batch = SpeculativeDecoder(hybrid, drafts=["suffix"]).generate(prompts, max_new_tokens=12)
    assert [result.token_ids for result in batch] == [plain(hybrid, prompt, 12) for prompt in prompts]


def test_passes_run_plain_with_the_reason(hybrid: Any) -> None:
    decoder = SpeculativeDecoder(hybrid, drafts=["suffix"], compile=True)
    assert decoder.passes == "passes: plain (it keeps states, which compiled passes cannot write)"


def test_graphs_are_refused(hybrid: Any) -> None:
    with pytest.raises(InputError, match="Qwen3_5ForCausalLM keeps states"):
        TreeModel(hybrid).session(1, 8, graphs=True)


def test_a_head_reads_the_states_of_hidden_layers() -> None:
    """An EAGLE-style head drafts for a hybrid: rows get the hidden states of what they accepted, without the replay."""
    target = build("qwen3_5_text", vocab_size=VOCAB, num_hidden_layers=4, layer_types=[*LINEAR["layer_types"]] * 2)
    head = draft_for(target)
    decoder = SpeculativeDecoder(target, drafts=[head], tree=Chain(3))
    batch = decoder.generate(PROMPTS, max_new_tokens=NEW)
    assert [result.token_ids for result in batch] == [plain(target, prompt, NEW) for prompt in PROMPTS]
    alone = [decoder.generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    trees = [[step.tree.tokens.tolist() for step in result.steps] for result in batch]
    assert trees == [[step.tree.tokens.tolist() for step in result.steps] for result in alone]


def test_inspections_score_the_chains_again(hybrid: Any) -> None:
    decoder = SpeculativeDecoder(hybrid, drafts=[oracle(hybrid)], tree=Chain(3))
    result = decoder.generate(PROMPTS[2], max_new_tokens=9)
    assert not inspect(decoder, result).differences


def test_likelihoods_are_those_of_a_plain_pass(hybrid: Any) -> None:
    score = SpeculativeDecoder(hybrid, drafts=[]).score(PROMPTS[0], [4, 8, 15])
    wanted = logits_after(hybrid, [*PROMPTS[0], 4, 8, 15], 4)[:3].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(score.log_probabilities), wanted[range(3), [4, 8, 15]], atol=1e-4, rtol=1e-4
    )
