"""`check_model` on tiny random models of many families, and its own power: broken masks must not pass it.

Nothing is downloaded: every model is built from a configuration with two layers and random weights.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import specinfer.attention.check as checking
import specinfer.attention.layout as masking
from specinfer.attention import Layout, ModelCheck, Support, TreeModel, check_model
from specinfer.attention.cache import Stack
from specinfer.attention.passes import plain
from specinfer.errors import UnsupportedModel

WINDOW = 5  # smaller than the prefix that `check_model` feeds
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE: dict[str, Any] = {
    **SIZES,
    **TOKENS,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **TOKENS}
HEAD = {"head_dim": 8}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

# name of a case -> configuration; what stands before a space is transformers' model type
EXACT: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen2 sliding": {**BASE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {**BASE, **HEAD},
    "mistral": {**BASE, "sliding_window": WINDOW},
    "gemma": {**BASE, **HEAD},
    "gemma2": {**BASE, **HEAD, **MIXED},
    "gemma3_text": {**BASE, **HEAD, **MIXED},
    "phi": BASE,
    "phi3": {**BASE, "sliding_window": WINDOW},
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": {**BASE, **MIXED},
    "smollm3": {**BASE, "no_rope_layers": [1, 0]},
    "granite": BASE,
    "gpt2": GPT,
    "opt": {**SIZES, "ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32},
    "gpt_neox": BASE,
    "stablelm": BASE,
    "gpt_oss": {**BASE, **HEAD, **MIXED, **LOCAL_MOE},
    "qwen2_moe": {**BASE, **MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**BASE, **HEAD, **MOE},
    "mixtral": {**BASE, "num_local_experts": 4},
    "starcoder2": {**BASE, "sliding_window": WINDOW},
    "cohere": BASE,
    "cohere2": {**BASE, **MIXED},
    "glm": {**BASE, **HEAD},
    "glm4": {**BASE, **HEAD},
    "falcon rotary": {**SIZES, "alibi": False, "max_position_embeddings": 256},
    "deepseek_v3": {**BASE, **MOE, **LATENT, **DEEPSEEK, "num_key_value_heads": 4},
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "ministral": {**BASE, **HEAD, **MIXED},
    "ernie4_5": {**BASE, **HEAD},
    "seed_oss": {**BASE, **HEAD},
    "nemotron": BASE,
}
EAGER = ["llama", "qwen2 sliding", "mistral", "gemma3_text", "gpt2", "opt", "gpt_neox", "phi3", "cohere2", "qwen3_moe"]
LOW_PRECISION = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "gpt2", "opt", "gpt_oss", "mixtral"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "no position_ids"),
    "falcon alibi": ({**SIZES, "alibi": True}, "ALiBi"),
}


def build(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None, **options: Any) -> Any:
    sizes = EXACT[name] if name in EXACT else REFUSED[name][0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **{**sizes, **options})
    chosen = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen).eval()


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no outcome of one test answer for another."""
    monkeypatch.setattr(checking, "_checked", weakref.WeakKeyDictionary())


@pytest.mark.parametrize("name", EXACT)
def test_families_with_tree_attention_are_exact(name: str) -> None:
    check = check_model(build(name))
    assert check.support is Support.EXACT, check.reason
    assert check.error < 2e-6
    assert "within" in check.reason


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_is_exact(name: str) -> None:
    check = check_model(build(name, attention="eager"))
    assert (check.support, check.attention) == (Support.EXACT, "eager"), check.reason
    assert check.error < 2e-6


@pytest.mark.parametrize(("name", "dtype"), [*zip(LOW_PRECISION, cycle([torch.bfloat16, torch.float16]))])
def test_sixteen_bits_are_exact_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    check = check_model(build(name, dtype))
    assert check.support is Support.EXACT, check.reason
    assert check.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["gpt2", "opt", "phi", "gpt_neox", "llama", "mistral", "gemma2"])
def test_float64_is_exact(name: str) -> None:
    check = check_model(build(name, torch.float64))
    assert check.support is Support.EXACT, check.reason
    assert check.error < 1e-6  # llama's norms and gemma's soft caps compute in float32 even then


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_branch_are_unsupported_and_told_why(name: str) -> None:
    check = check_model(build(name))
    assert check.support is Support.UNSUPPORTED
    assert REFUSED[name][1] in check.reason


def test_an_encoder_decoder_is_unsupported() -> None:
    sizes: dict[str, Any] = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    check = check_model(T5ForConditionalGeneration(T5Config(**sizes)))
    assert check.support is Support.UNSUPPORTED
    assert "encoder-decoder" in check.reason


@pytest.mark.parametrize("alibi", [True, False])
def test_mpt_is_a_chain_because_it_takes_no_positions(alibi: bool) -> None:
    sizes = {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", **sizes, attn_config={"alibi": alibi}))
    check = check_model(model)
    assert check.support is Support.CHAIN_ONLY
    assert ("ALiBi" if alibi else "position_ids") in check.reason
    assert check.error < 2e-6


def test_flash_attention_is_refused_by_name() -> None:
    model = build("llama")
    model.config._attn_implementation_internal = "flash_attention_2"  # as if the package were here
    check = check_model(model)
    assert (check.support, check.attention) == (Support.UNSUPPORTED, "flash_attention_2")
    assert "'flash_attention_2', which takes no tree mask" in check.reason
    with pytest.raises(UnsupportedModel, match="flash_attention_2"):
        TreeModel(model)


VISIBLE, POSITIONS = masking._visible, plain._positions


def plain_causal(layout: Layout, before: Any, window: int | None, kv_length: int) -> Tensor:
    """Let every node see all earlier columns, as a chain would."""
    pending = torch.arange(layout.visible.shape[1])
    return VISIBLE(layout._replace(visible=pending <= layout.columns[:, None]), before, window, kv_length)


def no_window(layout: Layout, before: Any, window: int | None, kv_length: int) -> Tensor:
    return VISIBLE(layout, before, None, kv_length)


def window_by_column(layout: Layout, before: Any, window: int | None, kv_length: int) -> Tensor:
    columns = torch.arange(layout.depths.shape[1]).expand_as(layout.depths)
    return VISIBLE(layout.at_depths(columns), before, window, kv_length)


def window_off_by_one(layout: Layout, before: Any, window: int | None, kv_length: int) -> Tensor:
    return VISIBLE(layout, before, window and window + 1, kv_length)


def one_length(layout: Layout, before: Any, window: int | None, kv_length: int) -> Tensor:
    """Forget that rows are ragged."""
    return VISIBLE(layout, before if isinstance(before, int) else before.max().expand_as(before), window, kv_length)


def positions_by_column(model: TreeModel, layout: Layout, before: Any, longest: int) -> Tensor:
    return POSITIONS(model, layout._replace(node_depths=layout.columns), before, longest)


def keep_the_first(stack: Any, rows: Any, sources: Any, targets: Any) -> None:
    """Forget to move the accepted slots."""


BREAKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "plain causal": (masking, "_visible", plain_causal),
    "no window": (masking, "_visible", no_window),
    "window by column": (masking, "_visible", window_by_column),
    "window off by one": (masking, "_visible", window_off_by_one),
    "one length": (masking, "_visible", one_length),
    "positions by column": (plain, "_positions", positions_by_column),
    "slots not moved": (Stack, "move_slots", keep_the_first),
}
TRIED = ("llama", "gpt2", "mistral", "gemma3_text", "gpt_oss")
POWER = [(n, b) for n in TRIED for b in BREAKS if "sliding_window" in EXACT[n] or "window" not in b]


@pytest.mark.parametrize(("name", "broken"), POWER)
def test_a_broken_mask_or_position_is_noticed(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    monkeypatch.setattr(*BREAKS[broken])
    check = check_model(model)
    assert check.support is not Support.EXACT
    assert "Error" not in check.reason  # it runs, and its logits are others


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_do_not_hide_a_broken_mask(
    broken: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # weights large enough that attention is not nearly uniform, as in trained models; rotary positions would
    # still move these logits by less than bfloat16 rounds them
    name = "gpt2" if broken == "positions by column" else "gemma3_text"
    model = build(name, dtype, initializer_range=0.3)
    assert check_model(model).support is Support.EXACT
    monkeypatch.setattr(checking, "_checked", weakref.WeakKeyDictionary())
    monkeypatch.setattr(*BREAKS[broken])
    assert check_model(model).support is not Support.EXACT


def test_a_bool_mask_is_wrong_for_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_converted", lambda implementation, visible, dtype: visible[:, None])
    assert check_model(build("qwen2", attention="sdpa")).support is Support.EXACT
    assert check_model(build("qwen2", attention="eager")).support is Support.UNSUPPORTED


class Positionless(GPT2LMHeadModel):
    """Takes position_ids and ignores them: positions are cache columns."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, past_key_values: Any = None, **rest: Any) -> Any:
        """Run without the positions."""
        return super().forward(input_ids, past_key_values=past_key_values, **rest)


def test_a_model_that_ignores_its_positions_is_not_exact() -> None:
    torch.manual_seed(0)
    check = check_model(Positionless(GPT2Config(**GPT)))
    assert check.support is Support.UNSUPPORTED
    assert "even a chain" in check.reason  # ragged rows have columns of their own


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were really checked."""
    calls: list[Any] = []
    classify = checking._classify

    def record(model: Any) -> Any:
        calls.append(model)
        return classify(model)

    monkeypatch.setattr(checking, "_classify", record)
    return calls


def test_the_same_model_is_checked_once(counted: list[Any]) -> None:
    model = build("llama")
    first = check_model(model)
    assert check_model(model) is first
    model.train()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert check_model(model) is first
    assert len(counted) == 1
    check_model(copy.deepcopy(model))
    assert len(counted) == 2


def mixing(module: Any, given: Any, output: Tensor) -> Tensor:
    """A forward hook that mixes positions."""
    return output - output.mean(1, keepdim=True)


def batching(module: Any, given: Any, output: Tensor) -> Tensor:
    """A forward hook that mixes rows."""
    return output - output.mean(0, keepdim=True) * (len(output) > 1)


def whole_tensor(module: Any, given: Any, output: Tensor) -> Tensor:
    """A forward hook that quantises activations to four bits with one scale for all of a pass."""
    scale = output.abs().max() / 7
    return (output / scale).round() * scale


def full_experts(module: Any, given: Any, output: Tensor) -> Tensor:
    """A forward hook of a mixture of experts with room for half of the tokens of a pass."""
    chosen = output.sum(-1).flatten() > 0
    full = chosen & (chosen.cumsum(0) > chosen.numel() // 4)
    return torch.where(full.view(output.shape[:-1])[..., None], torch.zeros_like(output), output)


def ones_alone(module: Any, given: Any, output: Tensor) -> Tensor:
    """A forward hook that only acts where a pass has one token a row."""
    return output * 0.5 if output.shape[1] == 1 else output


LEAKS = [mixing, batching, whole_tensor, full_experts, ones_alone]


@pytest.mark.parametrize("hook", LEAKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hook_through_which_tokens_disturb_each_other_is_unsupported(dtype: torch.dtype, hook: Any) -> None:
    """Although the model was exact before it came; and exact again when it has gone."""
    model = build("llama", dtype, initializer_range=0.3)
    assert check_model(model).support is Support.EXACT
    handle = model.model.norm.register_forward_hook(hook)
    assert check_model(model).support is Support.UNSUPPORTED, check_model(model)
    handle.remove()
    assert check_model(model).support is Support.EXACT


def test_dynamically_quantised_modules_are_unsupported() -> None:
    """Their scales are those of a whole pass; copies and models changed in place are seen."""
    from torch.ao.quantization import quantize_dynamic

    model = build("llama")
    assert check_model(model).support is Support.EXACT
    quantised = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    check = check_model(quantised)
    assert check.support is Support.UNSUPPORTED
    assert "other rows" in check.reason
    quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    assert check_model(model).support is Support.UNSUPPORTED


def by_pre_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(1, keepdim=True),))


def by_hook_with_names(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, given, named, output: mixing(*[output] * 3), with_kwargs=True)


def by_forward(model: Any) -> None:
    norm = model.model.norm
    own = norm.forward
    norm.forward = lambda states: mixing(norm, (), own(states))


def by_forward_of_a_forward(model: Any) -> None:
    by_forward(model)
    assert check_model(model).support is Support.UNSUPPORTED
    own = type(model.model.norm).forward
    norm = model.model.norm
    norm.forward = lambda states: own(norm, states)  # exact ...
    assert check_model(model).support is Support.EXACT
    by_forward(model)  # ... and patched anew


def by_module(model: Any) -> None:
    class Mean(torch.nn.Module):
        """Takes a norm's place."""

        def forward(self, states: Tensor) -> Tensor:
            """Mix positions."""
            return mixing(self, (), states)

    model.model.norm = Mean()


def by_kind(model: Any) -> None:
    class Mean(type(model.model.norm)):  # type: ignore[misc]
        """What a parametrisation does: another class for the same module."""

        def forward(self, states: Tensor) -> Tensor:
            """Mix positions."""
            return mixing(self, (), super().forward(states))

    model.model.norm.__class__ = Mean


CHANGES = [by_pre_hook, by_hook_with_names, by_forward, by_forward_of_a_forward, by_module, by_kind]


@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_change_a_model_is_seen(change: Callable[[Any], None]) -> None:
    model = build("llama")
    assert check_model(model).support is Support.EXACT
    change(model)
    assert check_model(model).support is Support.UNSUPPORTED


def test_hooks_of_all_modules_are_seen() -> None:
    model = build("llama")
    assert check_model(model).support is Support.EXACT

    def mix(module: Any, given: Any, output: Any) -> Any:
        return mixing(module, given, output) if isinstance(module, type(model.model.norm)) else None

    handle = torch.nn.modules.module.register_module_forward_hook(mix)
    try:
        assert check_model(model).support is Support.UNSUPPORTED
    finally:
        handle.remove()
    assert check_model(model).support is Support.EXACT


def test_attention_dtype_and_settings_are_looked_at(counted: list[Any]) -> None:
    model = build("llama")
    check_model(model)
    model.set_attn_implementation("eager")
    assert check_model(model).attention == "eager"
    model.double()
    assert check_model(model).dtype == "float64"
    model.model.norm.variance_epsilon = 0.5
    check_model(model)
    assert len(counted) == 4


def test_a_module_that_counts_its_passes_is_no_other_one(counted: list[Any]) -> None:
    """What passes themselves change cannot tell models apart, or every call would check anew."""

    model = build("llama")

    class Counting(type(model.model.norm)):  # type: ignore[misc]
        """Counts."""

        def forward(self, states: Tensor) -> Tensor:
            """Count, and run."""
            self.passes += 1
            return super().forward(states)

    model.model.norm.__class__, model.model.norm.passes = Counting, 0
    check_model(model)
    model(torch.tensor([[1, 2, 3]]))
    check_model(model)
    assert len(counted) == 1


def test_a_recorder_of_hidden_states_is_no_change(counted: list[Any]) -> None:
    """transformers leaves its hooks in the model once hidden states were asked for."""
    model = build("llama")
    check_model(model)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    check_model(model)
    assert len(counted) == 1


def test_what_is_known_of_a_model_does_not_keep_it() -> None:
    models = [build("llama")]
    norm, everything = models[0].model.norm, models[0]
    norm.register_forward_hook(lambda module, given, output, whole=everything: output)
    norm.forward = lambda states, own=norm.forward, whole=everything: own(states)
    assert check_model(everything).support is Support.EXACT
    gone = [weakref.ref(module) for module in everything.modules()]
    del models, norm, everything
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_threads_that_ask_at_once_have_one_look(counted: list[Any]) -> None:
    model = build("llama")
    with ThreadPoolExecutor(4) as threads:
        checks = list(threads.map(check_model, [model] * 8))
    assert len(counted) == 1
    assert all(check is checks[0] for check in checks)


def test_the_model_is_left_as_it_was() -> None:
    model = build("gpt2", resid_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()  # a frozen block
    modes = [module.training for module in model.modules()]
    config, weights = model.config.to_dict(), {name: w.clone() for name, w in model.state_dict().items()}
    assert check_model(model).support is Support.EXACT  # so dropout was off meanwhile
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(weights[name], w) for name, w in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_model_is_left_as_it_was() -> None:
    model = build("falcon alibi").train()
    assert check_model(model).support is Support.UNSUPPORTED
    assert all(module.training for module in model.modules())


def test_weights_that_are_not_numbers_are_unsupported() -> None:
    model = build("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    check: ModelCheck = check_model(model)
    assert check.support is Support.UNSUPPORTED


@pytest.mark.parametrize("context", [24, 32])
def test_a_short_context_is_checked_within_it(context: int) -> None:
    assert check_model(build("gpt2", n_positions=context)).support is Support.EXACT
    assert check_model(build("llama", max_position_embeddings=context)).support is Support.EXACT
