"""Decoder layers as one function: the same states as the library's own forward, and only where nothing is lost."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, MistralConfig, Phi3Config, PretrainedConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specinfer.attention import TreeModel, lay_out_chains, running
from specinfer.attention.cache import TreeCache
from specinfer.attention.packed import packed
from specinfer.attention.streamlined import FAMILY, Repeated, streamlined

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    LlamaConfig(**SIZES),
    MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    Qwen2Config(**SIZES),
]
STEP = [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]  # tokens of three passes


def model_of(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").double().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # all 1 after initialisation, as if there were none
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


def products_of(layer: nn.Module) -> dict[nn.Module, object]:
    """Products as packing makes them, in the layer's own precision."""

    def side_by_side(*layers: nn.Linear) -> object:
        return lambda states: torch.cat([each(states) for each in layers], -1)

    attention, mlp = layer.self_attn, layer.mlp
    groups = [
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    ]
    return {group[0]: side_by_side(*group) for group in groups}


@torch.inference_mode()
def states_of(model: nn.Module, masked: bool) -> list[torch.Tensor]:
    """Logits of passes that share a cache: with masks that hide every second token, or without."""
    cache, found = TreeCache(1, 16), []
    for tokens in STEP:
        cache.stage(len(tokens), torch.device("cpu"))
        mask = torch.ones(cache.extent, cache.extent).tril().bool()
        mask &= (torch.arange(cache.extent) % 2 == 0) | torch.eye(cache.extent).bool()
        added = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        first = tokens[0]
        given = {"attention_mask": added[None, None, -len(tokens) :]} if masked else {}
        positions = torch.arange(first, first + len(tokens))[None]
        found.append(model(torch.tensor([tokens]), position_ids=positions, past_key_values=cache, **given).logits)
        cache.keep([range(len(tokens))])
        if not masked:
            break  # without a mask, transformers makes a causal one of its own only for a first pass
    return found


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_streamlined_layers_compute_what_the_librarys_do(config: PretrainedConfig, masked: bool) -> None:
    model = model_of(config)
    expected = states_of(model, masked)
    masks = Repeated()  # shared by the layers, as they are made by the engine
    for layer in model.model.layers:
        assert type(layer) in FAMILY
        layer.__dict__["forward"] = streamlined(layer, products_of(layer), masks)
    for got, wanted in zip(states_of(model, masked), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_hidden_states_are_handed_out_as_before() -> None:
    model, ids = model_of(CONFIGS[1]), torch.arange(9)[None]
    expected = model(ids, output_hidden_states=True).hidden_states
    for layer in model.model.layers:
        layer.__dict__["forward"] = streamlined(layer, products_of(layer), Repeated())
    got = model(ids, output_hidden_states=True).hidden_states
    assert len(got) == len(expected)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(got, expected, strict=True))


def spoilt_by_a_hook(layer: nn.Module) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)


def spoilt_by_an_adapter(layer: nn.Module) -> None:
    layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj)


def spoilt_by_a_new_forward(layer: nn.Module) -> None:
    layer.self_attn.forward = functional.silu


def spoilt_by_eager_attention(layer: nn.Module) -> None:
    layer.self_attn.config._attn_implementation = "eager"


def spoilt_by_another_activation(layer: nn.Module) -> None:
    layer.self_attn.config.hidden_act = "gelu"


SPOILT = [
    spoilt_by_a_hook,
    spoilt_by_an_adapter,
    spoilt_by_a_new_forward,
    spoilt_by_eager_attention,
    spoilt_by_another_activation,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_layers_that_are_not_plain_keep_their_forward(spoil: object) -> None:
    layer = model_of(LlamaConfig(**SIZES)).model.layers[0]
    products = products_of(layer)
    assert streamlined(layer, products, Repeated()) is not None
    spoil(layer)
    assert streamlined(layer, products, Repeated()) is None


def test_other_families_keep_their_forward() -> None:
    model = model_of(Phi3Config(**SIZES, pad_token_id=0))
    assert streamlined(model.model.layers[0], {}, Repeated()) is None


def test_packed_models_are_streamlined_while_passes_run() -> None:
    model = model_of(LlamaConfig(**SIZES)).to(torch.bfloat16)
    layer, ids = model.model.layers[0], torch.arange(20)[None]
    with torch.inference_mode():
        exact, plain = copy.deepcopy(model).float()(ids).logits, model(ids).logits
        packed(model).refresh()
        with packed(model):
            if not packed(model).forwards:
                pytest.skip("oneDNN multiplies no bfloat16 on this CPU")
            assert "forward" in layer.__dict__
            quick = model(ids).logits
    assert "forward" not in layer.__dict__
    assert (quick - exact).abs().mean() < 1.2 * (plain - exact).abs().mean()  # as near as 16 bits come


def test_what_is_changed_between_calls_is_honoured() -> None:
    """A hook, or a forward of one's own, put in after the model was packed once."""
    model, seen = model_of(LlamaConfig(**SIZES)).to(torch.bfloat16), []
    first, second = model.model.layers
    packed(model).refresh()
    with packed(model):
        pass
    first.self_attn.register_forward_hook(lambda *_: seen.append("hook"))
    own = second.forward
    second.forward = lambda *args, **options: seen.append("own") or own(*args, **options)
    packed(model).refresh()
    with packed(model), torch.inference_mode():
        model(torch.arange(5)[None])
    assert seen == ["hook", "own"]
    assert second.__dict__["forward"] is not own


def test_one_token_a_row_is_what_the_layers_say() -> None:
    """Rows of different lengths, as a batch decodes."""
    model = model_of(LlamaConfig(**SIZES)).to(torch.bfloat16)
    tree_model, prompts = TreeModel(model), [list(range(9)), [3, 1], list(range(20, 25))]

    def logits() -> torch.Tensor:
        session = tree_model.session(3, 32)
        session.prefill(prompts)
        return session.append(lay_out_chains([[7], [8], [9]], torch.device("cpu")))

    plain = logits()
    with running(tree_model):
        if "forward" not in model.model.layers[0].__dict__:
            pytest.skip("oneDNN multiplies no bfloat16 on this CPU")
        quick = logits()
    assert (quick - plain).abs().mean() < 0.02 * plain.abs().mean()
