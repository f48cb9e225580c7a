"""Weights of 8 and 4 bits: what they are rounded to, how they are packed, and passes that read them so."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, tiny_llama
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from specinfer import SpeculativeDecoder, cli
from specinfer.attention import resumed
from specinfer.attention.compiler.linear import BITS, form_of, forms, pack, packed_shape
from specinfer.attention.compiler.making import check
from specinfer.attention.compiler.rounding import GROUP, integers, round_weights, rounded
from specinfer.errors import ModelError, UnsupportedModel
from specinfer.loading import load

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "top_k": 0, "seed": 3}


def weights() -> Tensor:
    """Rows of several sizes and spreads, with groups of zeros, of equal numbers, of one sign, of one large number."""
    torch.manual_seed(0)
    made = torch.randn(70, 3 * GROUP) * torch.logspace(-12, 4, 70)[:, None]
    made[3] = 0.0
    made[4, :GROUP] = 0.0
    made[5] = 2.5
    made[6] = made[6].abs()
    made[7] = -made[7].abs()
    made[8, 40] = 1e6
    made[9] = torch.tensor([1.0, -1.0]).repeat(48)
    return made


@pytest.mark.parametrize("form", BITS)
def test_rounded_numbers_are_bfloat16_numbers_and_found_again(form: str) -> None:
    given = weights()
    found = rounded(given, form)
    parts = integers(found, form)
    assert parts is not None
    numbers, scales = parts
    half = 2 ** (BITS[form] - 1)
    assert -half <= numbers.min() <= numbers.max() <= half - 1
    assert torch.equal(numbers * scales.repeat_interleave(GROUP, 1), found)
    assert torch.equal(found.bfloat16().float(), found)
    assert torch.equal(scales.bfloat16().float(), scales)
    assert torch.equal(rounded(found, form), found)
    assert torch.equal(rounded(given.bfloat16(), form), rounded(given.bfloat16().float(), form).bfloat16())


@pytest.mark.parametrize("form", BITS)
def test_numbers_are_rounded_to_the_nearest(form: str) -> None:
    """Only the largest of a group may move by more than half a step, as its scale has few bits."""
    given = weights()
    _, scales = integers(rounded(given, form), form) or pytest.fail("not rounded")
    steps = scales.abs().repeat_interleave(GROUP, 1)
    moved = (rounded(given, form) - given).abs() / steps
    inner = given.abs() < (2 ** (BITS[form] - 1) - 1) * steps
    assert moved[inner].max() <= 0.5 + 1e-6
    error = (rounded(given, form) - given).norm(dim=1) / given.norm(dim=1).clamp(min=1e-30)
    assert error.max() < {"int8": 0.02, "int4": 0.2}[form]


def test_other_numbers_are_not_taken_for_rounded_ones() -> None:
    for form in BITS:
        found = rounded(weights(), form)
        for change in (lambda w: w[11, 5].mul_(1.01), lambda w: w[12, 70].fill_(3 * w[12].abs().max()), torch.zero_):
            other = found.clone()
            change(other)
            assert (integers(other, form) is None) == bool(other.any())
        with pytest.raises(ValueError, match=f"numbers of {BITS[form]} bits"):
            pack([weights()], form)
    assert integers(weights()[:, :48], "int8") is None  # not whole groups
    nan = weights()
    nan[0, 0] = torch.nan
    assert integers(nan, "int8") is None


def unpacked(packed: Tensor, form: str, outputs: int) -> Tensor:
    """Read a packed weight as ``kernels/linear.h`` describes it, word by word."""
    bits, words = BITS[form], packed.tolist()
    found = torch.zeros(outputs, len(words[0]) * GROUP)
    for output in range(outputs):
        block, lane = divmod(output, 32)
        high, lane = divmod(lane, 16)
        for number, (scales, *rows) in enumerate(words[block]):
            scale = torch.tensor((scales[lane] >> 16 * high) & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
            flat = [
                (row[lane] >> (2 * bits * k + bits * high)) & (2**bits - 1) for row in rows for k in range(16 // bits)
            ]
            found[output, number * GROUP : (number + 1) * GROUP] = (
                torch.tensor(flat) - 2 ** (bits - 1)
            ) * scale.float()
    return found


@pytest.mark.parametrize("form", BITS)
def test_packed_weights_are_laid_out_as_their_header_says(form: str) -> None:
    given = rounded(weights(), form)
    packed = pack([given[:10], given[10:]], form)
    assert packed.shape == packed_shape(*given.shape, form)
    assert torch.equal(unpacked(packed, form, len(given)), given)


def test_the_form_of_a_model_is_that_of_its_smallest_weights() -> None:
    whole = weights().bfloat16()
    eight, four = rounded(whole, "int8"), rounded(whole, "int4")
    assert forms([whole, eight, four], rounded=False)[0] == "int4"
    assert forms([whole, eight], rounded=False)[0] == "int8"
    assert forms([weights()[:, :48], four.float()], rounded=False) == ["packed"]  # not all are bfloat16 numbers
    assert [form_of(each, "int4") for each in (whole, eight, four)] == ["bf16", "int8", "int4"]
    assert [form_of(each, "bf16") for each in (whole, eight, four)] == ["bf16"] * 3


def mixed(seed: int = 0) -> Any:
    """A rounded llama, one of whose weights is of bfloat16 numbers."""
    model = tiny_llama(seed, intermediate_size=96).bfloat16().float()
    round_weights(model, "int4")
    torch.manual_seed(seed)
    model.model.layers[1].mlp.down_proj.weight.data.copy_(torch.randn(32, 96).bfloat16())
    return model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeculativeDecoder]:
    """A decoder of that model, with its passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECINFER_CACHE", os.environ.get("SPECINFER_CACHE") or str(tmp_path_factory.mktemp("cache")))
        yield SpeculativeDecoder(mixed(), byte_tokenizer(), ["ngram"], compile=True)


def test_compiled_passes_read_them_as_they_are_and_change_no_sum(compiled: SpeculativeDecoder) -> None:
    target = compiled.target
    assert compiled.passes == "passes: compiled"
    assert target.ways.fast.form == "int4"
    runners = target.ways.fast.runners.values()
    kinds = {
        source.kind: source.names for runner in runners for source in runner.sources if source.kind in (*BITS, "bf16")
    }
    assert kinds.keys() == {"int4", "int8", "bf16"}
    assert kinds["int8"] == ("lm_head.weight",)
    assert kinds["bf16"] == ("model.layers.1.mlp.down_proj.weight",)
    with resumed(target):
        assert check(target, target.ways.fast, [*range(1, 30), 95, 96, 97, 110, 200]) < 1e-5


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_texts_are_those_of_the_rounded_model(compiled: SpeculativeDecoder, options: dict[str, Any]) -> None:
    plain = SpeculativeDecoder(mixed(), byte_tokenizer(), [], None, compile=False)
    for prompt in PROMPTS:
        assert compiled.generate(prompt, **options).token_ids == plain.generate(prompt, **options).token_ids


def test_weights_that_are_not_rounded_any_more_run_plain(compiled: SpeculativeDecoder) -> None:
    """New numbers of the same kinds are packed again."""
    model, other = compiled.target.model, mixed(seed=1)
    model.load_state_dict(other.state_dict())
    plain = SpeculativeDecoder(other, byte_tokenizer(), [], None, compile=False)
    wanted = plain.generate(PROMPTS[0], **GREEDY).token_ids
    assert compiled.generate(PROMPTS[0], **GREEDY).token_ids == wanted
    assert compiled.passes == "passes: compiled"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] += 1e-3
    compiled.generate(PROMPTS[0], **GREEDY)
    assert "not all are numbers of 4 bits any more" in compiled.passes


def test_output_embeddings_keep_8_bits_tied_or_not() -> None:
    for tied in (False, True):
        model = tiny_llama(intermediate_size=64, tie_word_embeddings=tied).bfloat16()
        before = model.get_input_embeddings().weight.clone()
        share = round_weights(model, "int4")
        assert 0.5 < share <= 1
        assert form_of(model.lm_head.weight, "int4") == "int8"
        assert form_of(model.model.layers[0].self_attn.q_proj.weight, "int4") == "int4"
        assert torch.equal(model.get_input_embeddings().weight, before) != tied


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(intermediate_size=64).float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_models_are_rounded_as_they_are_loaded_drafts_too(folder: Path) -> None:
    made = SpeculativeDecoder.from_pretrained(str(folder), [str(folder)], dtype="float32", quantize="int8")
    wanted = load(str(folder), "float32").model
    round_weights(wanted, "int8")
    for network in made.networks:
        for name, weight in network.model.state_dict().items():
            assert torch.equal(weight, wanted.state_dict()[name])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantize": "int2"}, "quantize='int2' is unknown: choose int4 or int8"),
    ({"quantize": 4}, "quantize=4 is unknown"),
    ({"quantize": "int8", "dtype": "float16"}, "float16 is not possible"),
    ({"quantize": "int8", "device_map": "auto"}, "device_map is given: leave one out"),
    ({"quantize": "int8", "quantization_config": object()}, "quantization_config is given"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_rounded_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(folder), **options)


def test_models_without_linear_layers_are_refused(tmp_path: Path) -> None:
    """GPT-2's are transposed, so most of it would stay as it is."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match="of its weights are in linear layers"):
        round_weights(model, "int8")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


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
