"""Models from quantised checkpoints in safetensors: tiny random ones are written as their programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from quantised_files import Format, awq, checkpoint, fp8, gptq, int_quantized, pack_quantized
from torch import Tensor, nn
from transformers import GemmaConfig, Qwen2MoeConfig

from specinfer import SpeculativeDecoder, cli, loading
from specinfer.attention.packed.formats import numbers
from specinfer.attention.packed.layout import unpack
from specinfer.attention.packed.modules import PackedLinear
from specinfer.checkpoints.quantised import load_quantised
from specinfer.errors import ModelError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


BYTES = {"num_bits": 8, "strategy": "channel", "group_size": None}
PACKED: dict[str, tuple[dict[str, Any], Format]] = {
    "awq": (AWQ, awq()),
    "awq, a row": (AWQ | {"group_size": -1}, awq(-1)),
    "awq, bfloat16 scales": (AWQ | {"group_size": 32}, awq(32, torch.bfloat16)),
    "gptq": (GPTQ, gptq()),
    "gptq, symmetric": (GPTQ | {"sym": True, "group_size": 32}, gptq(group=32, symmetric=True)),
    "gptq, 8 bits": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, -1)),
    "gptq, act-order": (GPTQ | {"desc_act": True, "group_size": 32}, gptq(group=32, act_order=True)),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(less=0)),
    "gptq, version 2, 8 bits": (GPTQ | {"format": "gptq_v2", "bits": 8}, gptq(8, less=0)),
    "packed": (compressed("pack-quantized"), pack_quantized()),
    "packed, float16 scales": (compressed("pack-quantized"), pack_quantized(scale=torch.float16)),
    "packed, float32 scales": (compressed("pack-quantized"), pack_quantized(scale=torch.float32)),
    "packed, zero points": (
        compressed("pack-quantized", symmetric=False, group_size=64),
        pack_quantized(group=64, symmetric=False),
    ),
    "packed, 8 bits, a row": (compressed("pack-quantized", **BYTES), pack_quantized(8, -1)),
    "packed, act-order": (compressed("pack-quantized", actorder="group"), pack_quantized(act_order=True)),
    "bytes": (compressed("int-quantized", **BYTES), int_quantized()),
    "bytes, zero points": (compressed("int-quantized", **BYTES, symmetric=False), int_quantized(symmetric=False)),
    "bytes, 4 bits": (compressed("naive-quantized"), int_quantized(4, 32)),
    "bytes, one scale": (compressed("int-quantized", **BYTES | {"strategy": "tensor"}), int_quantized(tensor=True)),
}
FLOAT = {"type": "float", "num_bits": 8, "group_size": None}
DENSE: dict[str, tuple[dict[str, Any], Format]] = {
    "fp8": (FP8, fp8()),
    "fp8, small blocks": (FP8 | {"weight_block_size": [64, 48]}, fp8((64, 48))),
    "fp8, one scale": (FP8 | {"weight_block_size": None}, fp8((0, 0), scalar=True)),
    "float-quantized": (compressed("float-quantized", **FLOAT, strategy="channel"), fp8((1, 0), "weight_scale")),
    "float-quantized, blocks": (
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 32]),
        fp8((64, 32), "weight_scale"),
    ),
}
IDS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))


def weight_of(module: Any) -> Tensor:
    """A layer's numbers, its inputs in their own order."""
    if not isinstance(module, PackedLinear):
        return module.weight
    whole = torch.cat([numbers(part) for part in unpack(module.packed, module.in_features)])
    if module.order is None:
        return whole
    return torch.empty_like(whole).index_copy_(1, module.order, whole)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        loading.load(folder, **options)
    return str(caught.value)


@pytest.mark.parametrize("case", PACKED)
def test_numbers_are_those_of_the_formula_and_so_are_logits(tmp_path: Path, case: str) -> None:
    settings, form = PACKED[case]
    wanted = checkpoint(tmp_path, settings, form)
    model = loading.load(tmp_path).model
    for path, module in wanted.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(weight_of(model.get_submodule(path)), module.weight), path
            assert (type(model.get_submodule(path)) is PackedLinear) == (path != "lm_head")
    with torch.inference_mode():
        logits, theirs = model(IDS).logits, wanted(IDS).logits
    assert (logits - theirs).square().mean().sqrt() < 5e-4 * theirs.std()
    assert type(model) is type(wanted)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.name_or_path == str(tmp_path)


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_8_bits_with_a_point_become_dense(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    settings, form = DENSE[case]
    wanted = checkpoint(tmp_path, settings, form)
    state = loading.load(tmp_path, dtype).model.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    assert all(torch.equal(state[name], weight.to(dtype)) for name, weight in wanted.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_biases_shards_and_tied_embeddings(tmp_path: Path, tied: bool) -> None:
    wanted = checkpoint(
        tmp_path,
        AWQ,
        awq(),
        "qwen2",
        parts=3,
        tie_word_embeddings=tied,
        more={"lm_head.weight": None} if tied else None,
    )
    model = loading.load(tmp_path).model
    layer, theirs = model.model.layers[1].self_attn, wanted.model.layers[1].self_attn
    assert torch.equal(layer.q_proj.bias, theirs.q_proj.bias)
    assert layer.o_proj.bias is None
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with torch.inference_mode():
        assert (model(IDS).logits - wanted(IDS).logits).abs().max() < 1e-3 * wanted(IDS).logits.std()


def test_a_head_of_a_checkpoint_is_not_tied(tmp_path: Path) -> None:
    wanted = checkpoint(tmp_path, GPTQ | {"lm_head": True}, gptq(), dense="nothing")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    model = loading.load(tmp_path).model
    assert torch.equal(weight_of(model.lm_head), wanted.lm_head.weight)


def test_a_bias_that_the_model_lacks_is_added(tmp_path: Path) -> None:
    """Older programs write them, of zeros."""
    bias = torch.randn(128).half()
    checkpoint(tmp_path, GPTQ, gptq(), more={"model.layers.0.self_attn.o_proj.bias": bias})
    assert torch.equal(loading.load(tmp_path).model.model.layers[0].self_attn.o_proj.bias, bias.float())


def test_layers_that_are_not_quantised_stay(tmp_path: Path) -> None:
    ignored = compressed("pack-quantized") | {
        "ignore": ["lm_head", "re:.*down_proj", "model.layers.1.self_attn.q_proj"]
    }
    wanted = checkpoint(tmp_path, ignored, pack_quantized(), dense=r"lm_head|down_proj|1\.self_attn\.q_proj")
    model = loading.load(tmp_path).model
    assert sum(type(module) is PackedLinear for module in model.modules()) == 2 * 6 - 1
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, wanted.model.layers[0].mlp.down_proj.weight)


def test_layers_of_a_checkpoint_may_differ(tmp_path: Path) -> None:
    settings = compressed("mixed-precision")
    four, eight = pack_quantized(), int_quantized()
    of_down = compressed("int-quantized", **BYTES)["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}
    settings["config_groups"]["group_0"]["format"] = "pack-quantized"
    settings["config_groups"]["group_1"] = of_down | {"format": "int-quantized"}
    wanted = checkpoint(tmp_path, settings, lambda n, k, g: (eight if k == 192 else four)(n, k, g))
    model = loading.load(tmp_path).model
    for path, module in wanted.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(weight_of(model.get_submodule(path)), module.weight), path


def test_tensors_for_states_are_not_needed(tmp_path: Path) -> None:
    more = {
        "model.layers.0.self_attn.q_proj.input_scale": torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
    }
    settings = compressed("int-quantized", **BYTES)
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    checkpoint(tmp_path, settings, int_quantized(), more=more)
    assert type(loading.load(tmp_path).model.model.layers[0].self_attn.q_proj) is PackedLinear


# ---- texts ----


@pytest.mark.parametrize("case", ["awq", "gptq, act-order", "packed", "fp8"])
def test_texts_are_the_plain_models_with_drafts_of_the_same_kind(tmp_path: Path, case: str) -> None:
    checkpoint(tmp_path, *(PACKED | DENSE)[case])
    decoder = SpeculativeDecoder.from_pretrained(str(tmp_path), drafts=[str(tmp_path)], compile=False, dtype="float32")
    wanted = decoder.target.model.generate(IDS[:1], max_new_tokens=12, do_sample=False)[0, 12:].tolist()
    result = decoder.generate(IDS[0].tolist(), max_new_tokens=12)
    assert list(result.token_ids) == wanted
    assert result.stats.target_passes < 12


# ---- what is refused ----

DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "bits": (AWQ | {"bits": 3}, "bits 3, and 4 are read"),
    "type": (AWQ | {"bits": "four"}, "bits 'four', and should be of type int"),
    "version": (AWQ | {"version": "gemv"}, "version 'gemv', and gemm are read"),
    "group size": (
        AWQ | {"group_size": 48},
        "model.layers.0.self_attn.q_proj: groups of 48 inputs are to divide rows of 128",
    ),
    "other group size": (AWQ | {"group_size": 32}, "has shape (2, 16), and should have (4, 16)"),
    "no group size": (AWQ | {"group_size": None}, "group_size None, and should be of type int"),
    "unknown setting": (AWQ | {"rotation": "hadamard"}, "quantization_config has rotation, which is not read"),
    "not converted": (
        AWQ | {"modules_to_not_convert": ["q_proj"]},
        "tensors are not known (model.layers.0.self_attn.q_proj",
    ),
    "other method": (GPTQ, "qweight has shape (128, 16), and should have (16, 128)"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    checkpoint(folder, AWQ, awq())
    return folder


@pytest.fixture(autouse=True)
def nothing_is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "refused" in request.node.name:
        monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)


def changed(folder: Path, settings: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))


@pytest.mark.parametrize("case", DAMAGED)
def test_settings_that_are_not_the_files_are_refused(sound: Path, case: str) -> None:
    settings, message = DAMAGED[case]
    changed(sound, settings)
    assert message in refusal(sound)
    assert "\n" not in refusal(sound)


Q = "model.layers.1.self_attn.q_proj"
TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": ({f"{Q}.scales": None}, f"lacks 1 tensors ({Q}.scales)"),
    "no integers": ({f"{Q}.qweight": None, f"{Q}.qzeros": None}, f"lacks 2 tensors ({Q}.qweight, {Q}.qzeros)"),
    "no layer": ({f"{Q}.{leaf}": None for leaf in ("qweight", "qzeros", "scales")}, f"lacks 1 tensors ({Q}.weight)"),
    "shape": ({f"{Q}.qweight": torch.zeros(64, 16).int()}, f"{Q}.qweight has shape (64, 16), and should have"),
    "type": ({f"{Q}.qweight": torch.zeros(128, 16)}, f"{Q}.qweight is of type F32, and should be I32"),
    "another": ({f"{Q}.rotation": torch.zeros(2)}, f"1 of its tensors are not known ({Q}.rotation)"),
    "a quantised norm": ({"model.norm.weight": torch.zeros(128).char()}, "model.norm.weight is of type I8"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_the_models_are_refused(tmp_path: Path, case: str) -> None:
    more, message = TENSORS[case]
    checkpoint(tmp_path, AWQ, awq(), more=more)
    assert message in refusal(tmp_path)


def test_files_that_end_early_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ, awq(), parts=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path.name} cannot be read" in refusal(tmp_path)
    path.unlink()
    assert f"{path.name} cannot be read" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    assert "names files of other folders" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "index.json cannot be read" in refusal(tmp_path)


def test_values_that_no_matrix_has_are_named(tmp_path: Path) -> None:
    index = torch.arange(128).int() // 64
    more: dict[str, Tensor | None] = {f"{Q}.g_idx": index.clamp(max=0)}
    checkpoint(tmp_path, GPTQ, gptq(), more=more)
    assert f"{Q}: its g_idx does not put 64 inputs into each of 2 groups" in refusal(tmp_path)
    checkpoint(tmp_path, GPTQ, gptq(), more={f"{Q}.g_idx": index - 1})
    assert f"{Q}: its g_idx does not put 64 inputs" in refusal(tmp_path)
    checkpoint(tmp_path, GPTQ, gptq(), more={f"{Q}.qzeros": torch.full((2, 16), -1).int()})
    assert f"{Q}: a zero point is stored as 15" in refusal(tmp_path)
    checkpoint(tmp_path, GPTQ, gptq(), more={f"{Q}.scales": torch.full((2, 128), torch.nan).half()})
    assert f"{Q}: a scale is not a number" in refusal(tmp_path)


def test_orders_that_are_missing_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, GPTQ | {"desc_act": True}, gptq(), more={f"{Q}.g_idx": None})
    assert f"lacks 1 tensors ({Q}.g_idx)" in refusal(tmp_path)
    checkpoint(tmp_path, compressed("pack-quantized", actorder="group"), pack_quantized())
    assert "lacks 14 tensors (model.layers.0.mlp.down_proj.weight_g_idx, " in refusal(tmp_path)


def test_zero_points_with_wide_scales_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ, awq(scale=torch.float32))
    assert "its scales have 32 bits, and 16 are read beside zero points" in refusal(tmp_path)


def test_integers_of_more_bits_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, compressed("int-quantized"), int_quantized(8, 32))
    assert "an integer has more than 4 bits" in refusal(tmp_path)


def test_rotations_and_sparse_matrices_are_refused(sound: Path) -> None:
    settings = compressed("pack-quantized")
    changed(sound, settings | {"transform_config": {"config_groups": {"R1": {}}}})
    assert "its transform_config rotates states" in refusal(sound)
    changed(sound, settings | {"sparsity_config": {"format": "sparse-24-bitmask"}})
    assert "its sparsity_config says 'sparse-24-bitmask'" in refusal(sound)
    changed(sound, settings | {"format": "nvfp4-pack-quantized"})
    assert "format 'nvfp4-pack-quantized', and pack-quantized and" in refusal(sound)


def test_other_dtypes_are_refused(sound: Path) -> None:
    changed(sound, AWQ)
    assert "torch.bfloat16 is not possible for it; its states are float32" in refusal(sound, dtype="bfloat16")


def test_weights_that_do_not_fit_into_memory_are_refused(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(sound, AWQ)
    monkeypatch.setattr("specinfer.checkpoints.filling.free_bytes", lambda: 1000.0)
    assert "its weights need 0.0 GB of memory" in refusal(sound)


def test_integers_of_fewer_bits_stay_as_they_are_if_weights_are_rounded(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ, awq())
    whole, rounded = (loading.load(str(tmp_path), quantize=form).model for form in (None, "int8"))
    before, after = (
        [module.packed for module in model.modules() if isinstance(module, PackedLinear)] for model in (whole, rounded)
    )
    assert len(after) > len(before)  # the output matrix is dense there
    assert all(any(torch.equal(each, other) for other in after) for each in before)


def test_the_command_line_reads_them_too(sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def call(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr("sys.argv", ["specinfer", *arguments, "--target", str(sound), "--draft", "ngram"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, "".join(capsys.readouterr())

    changed(sound, AWQ)
    command = "generate", "aa", "--raw", "--max-new-tokens", "4"
    assert call(*command)[0] in (None, 0)
    monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)
    changed(sound, AWQ | {"bits": 3})
    code, told = call(*command)
    assert code == 2
    assert "bits 3, and 4 are read" in told
    assert told.count("\n") == 1


LIES = {
    "cut": ("model.safetensors", "model.safetensors cannot be read"),
    "no tokenizer": ("tokenizer.json", "tokenizer"),
    "no model": ("config.json", "config.json"),
    "more than memory": ("", "its weights need 0.0 GB of memory, and 0.0 GB are free"),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_command_line_refuses_folders_in_one_line(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is packed."""
    checkpoint(tmp_path, AWQ, awq())
    name, message = LIES[lie]
    if lie == "cut":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    elif name:
        (tmp_path / name).unlink()
    else:
        monkeypatch.setattr("specinfer.checkpoints.filling.free_bytes", lambda: 1000.0)
    monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)
    monkeypatch.setattr("sys.argv", ["specinfer", "generate", "aa", "--target", str(tmp_path), "--draft", "ngram"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = "".join(capsys.readouterr())
    assert ended.value.code == 2
    assert message in told
    assert told.count("\n") == 1


def test_a_name_in_the_hubs_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--someone--tiny" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    checkpoint(folder, AWQ, awq())
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 5]}')
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = loading.load("someone/tiny").model
    assert type(model.model.layers[0].mlp.up_proj) is PackedLinear
    assert model.generation_config.eos_token_id == [257, 5]


@pytest.mark.parametrize("kind", [Qwen2MoeConfig, GemmaConfig])
def test_other_models_are_for_transformers(sound: Path, kind: Any) -> None:
    """Those with experts, or with tables that are not made of the configuration alone."""
    options = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    assert load_quantised(sound, kind(quantization_config=AWQ, **options), None, torch.float32) is None


def test_other_options_are_for_transformers(sound: Path) -> None:
    """Which needs another package for them, and says so."""
    changed(sound, AWQ)
    assert "gptqmodel" in refusal(sound, device_map={"": "cpu"}).lower()
