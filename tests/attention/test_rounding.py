"""Weights rounded to 8 and 4 bits: to which numbers, in which layers of which models, and what models then do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, tiny_llama
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from specinfer import SpeculativeDecoder, cli
from specinfer.attention.packed import products
from specinfer.attention.packed.formats import numbers
from specinfer.attention.packed.layout import GROUP, kind_of, pack, unpack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.checkpoints.rounding import round_weights, rounded
from specinfer.decoder import load_draft
from specinfer.errors import ModelError, UnsupportedModel
from specinfer.loading import load, rounding_pays

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0}
BITS = {"int4": 4, "int8": 8}


def weights() -> Tensor:
    """Rows of several sizes and spreads, with groups of zeros, of equal numbers, of one sign, of one large number."""
    torch.manual_seed(0)
    made = torch.randn(70, 3 * GROUP) * torch.logspace(-2, 3, 70)[:, None]
    made[3] = 0.0
    made[4, :GROUP] = 0.0
    made[5] = 2.5
    made[6] = made[6].abs()
    made[7] = -made[7].abs()
    made[8, 40] = 1e5
    made[9] = torch.tensor([1.0, -1.0]).repeat(48)
    return made


@pytest.mark.parametrize("bits", BITS.values())
def test_numbers_are_rounded_to_the_nearest(bits: int) -> None:
    """Numbers beyond the highest integer become that one: at 8 bits by half a step, at 4 where it lessens the error."""
    given = weights()
    found = rounded(given, bits)
    steps = found.scale.float().abs().repeat_interleave(GROUP, 1)
    moved = numbers(found) - given
    inner = given.abs() < (2 ** (bits - 1) - 1) * steps
    assert (moved[inner].abs() / steps[inner]).max() <= 0.5 + 1e-6
    error = moved.norm(dim=1) / given.norm(dim=1).clamp(min=1e-30)
    assert error.max() < {8: 0.008, 4: 0.12}[bits]
    assert not moved[3].any()
    again = rounded(numbers(found), bits)
    torch.testing.assert_close(numbers(again), numbers(found), rtol={8: 2e-2, 4: 1e-3}[bits], atol=0)


def test_no_scale_of_a_few_has_a_smaller_error_than_the_one_chosen() -> None:
    given = torch.randn(40, GROUP, generator=torch.Generator().manual_seed(1))
    extreme = given.gather(1, given.abs().argmax(1, keepdim=True))
    least = (numbers(rounded(given, 4)) - given).square().sum(1)
    for factor in (1.0, 0.92):
        scale = (extreme / -8 * factor).half().float()
        other = (given / scale).round().clamp(-8, 7) * scale
        assert (least <= (other - given).square().sum(1) + 1e-6).all()


@pytest.mark.parametrize("bits", BITS.values())
def test_rounded_weights_are_packed_and_found_again(bits: int) -> None:
    found = rounded(weights(), bits)
    packed = pack([found], 70, 3 * GROUP)
    assert kind_of(packed)[1] == bits
    assert torch.equal(torch.cat([numbers(part) for part in unpack(packed, 3 * GROUP)]), numbers(found))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e9])
def test_numbers_that_have_no_scale_are_refused(wrong: float) -> None:
    given = weights()
    given[11, 5] = wrong
    with pytest.raises(ModelError, match="numbers"):
        rounded(given, 8)
    model = tiny_llama(intermediate_size=64)
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = wrong
    with pytest.raises(ModelError, match=r"to int4: model\.layers\.1\.mlp\.up_proj"):
        round_weights(model, "int4")


def matrix(module: Any) -> Tensor:
    """Return the numbers of a packed layer or embeddings."""
    inputs = module.in_features if isinstance(module, PackedLinear) else module.embedding_dim
    return torch.cat([numbers(part) for part in unpack(module.packed, inputs)])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", BITS)
def test_a_rounded_model_computes_with_the_rounded_numbers(form: str, tied: bool) -> None:
    model, dense = (tiny_llama(intermediate_size=64, tie_word_embeddings=tied).bfloat16().eval() for _ in range(2))
    round_weights(model, form)
    assert model.dtype == model.config.dtype == torch.float32
    assert not any(type(module) is nn.Linear or module.training for module in model.modules())
    assert kind_of(model.lm_head.packed)[1] == 8
    assert kind_of(model.model.layers[0].self_attn.q_proj.packed)[1] == BITS[form]
    assert isinstance(model.get_input_embeddings(), PackedEmbedding) == tied
    if tied:
        assert model.get_input_embeddings().packed is model.lm_head.packed
    dense.float()
    for path, module in list(dense.named_modules()):
        if isinstance(module, nn.Linear):
            wanted = numbers(rounded(module.weight, 8 if path == "lm_head" else BITS[form]))
            assert torch.equal(matrix(model.get_submodule(path)), wanted)
            module.weight.data = wanted
    if tied:
        dense.model.embed_tokens.weight.data = dense.lm_head.weight.data
    ids = torch.arange(1, 30)[None]
    found, wanted = model(ids).logits, dense(ids).logits
    assert (found - wanted).norm() < 1e-3 * (wanted - wanted.mean()).norm()  # states are rounded to 16 bits


def test_packed_matrices_are_rounded_again_if_they_have_the_bits() -> None:
    model = tiny_llama(intermediate_size=64, tie_word_embeddings=True)
    round_weights(model, "int8")
    kept = model.lm_head.packed
    eight = matrix(model.model.layers[0].mlp.up_proj)
    round_weights(model, "int4")
    assert model.lm_head.packed is kept is model.get_input_embeddings().packed
    assert torch.equal(matrix(model.model.layers[0].mlp.up_proj), numbers(rounded(eight, 4)))
    four = model.model.layers[0].mlp.up_proj.packed
    round_weights(model, "int8")
    assert model.model.layers[0].mlp.up_proj.packed is four


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(intermediate_size=64).float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if products.library() is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_texts_are_the_rounded_models_own_compiled_and_not(folder: Path, cache: None) -> None:
    made = SpeculativeDecoder.from_pretrained(str(folder), [str(folder)], quantize="int4", compile=True)
    assert made.passes.startswith("passes: target compiled, ")
    assert made.passes.endswith(" compiled (activations in 8 bits)")
    assert [kind_of(network.model.lm_head.packed)[1] for network in made.networks] == [8, 8]
    plain = SpeculativeDecoder.from_pretrained(str(folder), [], None, quantize="int4", compile=False)
    for prompt in PROMPTS:
        assert made.generate(prompt, **GREEDY).token_ids == plain.generate(prompt, **GREEDY).token_ids


def test_drafts_are_rounded_where_nothing_else_is_asked_for(folder: Path, tmp_path: Path) -> None:
    fast = rounding_pays("cpu")
    for asked, bits in (({}, 4 if fast else 0), ({"dtype": "float32"}, 0), ({"quantize": "int8"}, 8)):
        options = {"dtype": "auto", "device": "cpu", **asked}
        layer = load_draft(str(folder), **options).model.model.model.layers[0].mlp.up_proj
        assert (kind_of(layer.packed)[1] if isinstance(layer, PackedLinear) else 0) == bits
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_draft(str(tmp_path), "auto", "cpu").model.vocab_size == 300  # it cannot be rounded, and stays whole
    with pytest.raises(ModelError, match="of its weights are in linear layers"):
        load_draft(str(tmp_path), "auto", "cpu", "int4")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantize": "int2"}, "quantize='int2' is unknown: choose int4 or int8"),
    ({"quantize": 4}, "quantize=4 is unknown"),
    ({"activations": "int4"}, "activations='int4' is unknown: give int8, or leave it out"),
    ({"activations": "int8"}, "has none; give a GGUF file or a quantised checkpoint, or quantize= as well"),
    ({"quantize": "int8", "dtype": "bfloat16"}, "states are float32 then: leave dtype out"),
    ({"quantize": "int8", "device_map": "auto"}, "device_map is given: leave one out"),
    ({"quantize": "int8", "tensor_parallel": 2}, "tensor_parallel is given: leave one out"),
    ({"quantize": "int8", "quantization_config": object()}, "quantization_config is given"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_rounded_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(folder), **options)


def test_models_without_linear_layers_are_refused() -> None:
    """GPT-2's are transposed, so most of it would stay as it is."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match="of its weights are in linear layers"):
        round_weights(model, "int8")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_models_that_read_weights_by_themselves_are_refused() -> None:
    model = tiny_llama(intermediate_size=64)
    layer = model.model.layers[0].mlp
    layer.forward = lambda states: layer.down_proj(states @ layer.up_proj.weight.T)
    with pytest.raises(UnsupportedModel, match="its code reads weights by itself"):
        round_weights(model, "int8")


def test_models_of_other_libraries_are_refused() -> None:
    model = tiny_llama(intermediate_size=64)
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedModel, match="another library quantised it"):
        round_weights(model, "int8")


def test_the_command_line_says_it_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["specinfer", "generate", "hello", "--target", str(folder), "--quantize", "int3"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "choose int4 or int8" in said[0]
