"""Models with recurrent or convolutional layers: verified as chains, exactly, or refused with the reason.

Nothing is downloaded: every model is built from a configuration with few layers and random weights.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import specinfer.attention.recurrent as recurrent
from specinfer import Chain, ModelDraft, NGramDraft, SpeculativeDecoder
from specinfer.attention import Support, TreeModel, check_model, lay_out_chains, running
from specinfer.errors import CacheError, UnsupportedModel
from specinfer.tree import BestFirst

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
    "lfm3": (BASE, "layers 0, 1 (conv)"),
    "zaya": (BASE, "layers 0, 1 (hybrid)"),
    "rwkv": ({**SIZES, **TOKENS, "attention_hidden_size": 32}, "its layers"),
    # these mask tokens in a way of their own
    "llama4_text": ({**BASE, **HEAD, "num_local_experts": 2, "attention_chunk_size": 8}, "(chunked_attention)"),
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
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, ModelDraft]]:
    model = build(request.param)
    yield request.param, model, near(model, 0.05)


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """Return what transformers generates."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, use_cache=True)
    return found[0, len(prompt) :].tolist()


def test_the_check_says_chain_only_and_why(pair: tuple[str, Any, ModelDraft]) -> None:
    name, model, _ = pair
    check = check_model(model)
    assert check.support is Support.CHAIN_ONLY, check.reason
    assert f"a token cannot have siblings in {CHAINS[name][1]}"[-20:] in check.reason
    assert check.error < 1e-5


def test_greedy_text_is_that_of_generate(pair: tuple[str, Any, ModelDraft]) -> None:
    """With a draft that is right sometimes: after partial and after full acceptance, and after neither."""
    _, model, draft = pair
    result = SpeculativeDecoder(model, drafts=[draft], tree=Chain(4)).generate(PROMPTS[0], max_new_tokens=NEW)
    assert result.token_ids == greedy(model, PROMPTS[0])
    assert len(set(result.token_ids)) > 3
    kept = [len(step.path) for step in result.steps if len(step.tree) > 1]
    drafted = [len(step.tree) - 1 for step in result.steps if len(step.tree) > 1]
    assert 0 < sum(kept) < sum(drafted)


def test_n_grams_and_auto_do_not_change_the_text(pair: tuple[str, Any, ModelDraft]) -> None:
    _, model, _ = pair
    wanted = greedy(model, PROMPTS[0])
    for drafts, tree in ((["ngram"], Chain(3)), (["suffix"], "auto"), ("auto", "auto"), ([], None)):
        result = SpeculativeDecoder(model, drafts=drafts, tree=tree).generate(PROMPTS[0], max_new_tokens=NEW)
        assert result.token_ids == wanted


def test_sampled_text_is_the_same_without_speculation_and_in_a_batch(pair: tuple[str, Any, ModelDraft]) -> None:
    _, model, draft = pair
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.8}
    plain = SpeculativeDecoder(model, drafts=[], tree=None)
    decoder = SpeculativeDecoder(model, drafts=[draft], tree=Chain(3))
    alone = [plain.generate(prompt, seed=seed, **options).token_ids for seed, prompt in enumerate(PROMPTS)]
    batch = decoder.generate(PROMPTS, seed=range(len(PROMPTS)), **options)
    assert [result.token_ids for result in batch] == alone
    assert sum(len(step.path) for result in batch for step in result.steps) > 0


def test_a_ragged_batch_is_its_rows(pair: tuple[str, Any, ModelDraft]) -> None:
    """Rows end at different steps."""
    _, model, draft = pair
    decoder = SpeculativeDecoder(model, drafts=[draft], tree=Chain(4))
    lengths = [NEW, 5, 13]
    batch = decoder.generate(PROMPTS, max_new_tokens=lengths)
    wanted = [greedy(model, prompt, new) for prompt, new in zip(PROMPTS, lengths, strict=True)]
    assert [result.token_ids for result in batch] == wanted


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
