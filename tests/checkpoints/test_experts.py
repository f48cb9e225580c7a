"""Mixtures of experts whose weights are packed: tiny random files are written, and compared with dense models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer
from gguf_files import Made
from quantised_files import SIZES, awq, checkpoint, gptq, matrices, pack_quantized, write
from test_gguf import SIZES as IN_FILES
from test_gguf import TOKENS, metadata, tensors, written
from test_quantised_checkpoints import AWQ, GPTQ, IDS, compressed, refusal, weight_of
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from specinfer import SpeculativeDecoder, loading
from specinfer.attention.packed.modules import Experts, PackedLinear
from specinfer.errors import ModelError

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CASES = {"awq": (AWQ, awq()), "gptq": (GPTQ, gptq()), "packed": (compressed("pack-quantized"), pack_quantized())}
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def near(model: Any, wanted: Any, ids: Tensor = IDS) -> None:
    with torch.inference_mode():
        logits, theirs = model(ids).logits, wanted(ids).logits
    assert (logits - theirs).abs().max() < 1e-3 * theirs.std()


def texts_are_the_same(where: str, vocabulary: int = 256) -> None:
    """With a draft of the same kind, with another one, and without."""
    plain = SpeculativeDecoder.from_pretrained(where, drafts=[], compile=False)
    prompt = [number % vocabulary for number in (5, 9, 17, 5, 9)]
    wanted = plain.generate(prompt, max_new_tokens=12).token_ids
    assert (
        list(wanted)
        == plain.target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    )
    for draft in (where, "ngram"):
        result = SpeculativeDecoder.from_pretrained(where, drafts=[draft], compile="auto").generate(
            prompt, max_new_tokens=12
        )
        assert result.token_ids == wanted
        assert draft == "ngram" or result.stats.target_passes < 12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_experts_of_checkpoints_are_packed_one_by_one(tmp_path: Path, case: str, kind: str) -> None:
    more = {"shared_expert_intermediate_size": 64} if kind == "qwen2_moe" else {}
    wanted = checkpoint(tmp_path, *CASES[case], kind, "lm_head|shared_expert_gate", **MOE, **more)
    model = loading.load(tmp_path).model
    own = dict(model.named_modules())
    found = [path for path, weight in matrices(wanted) if torch.equal(weight_of(own[path]), weight)]
    assert len(found) == len(list(matrices(wanted)))
    assert sum(type(own[path]) is PackedLinear for path in found) == 2 * (4 + 8 * 3 + 3 * (kind == "qwen2_moe"))
    near(model, wanted)


def test_texts_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, *CASES["awq"], "qwen3_moe", **MOE)
    texts_are_the_same(str(tmp_path))
    made = SpeculativeDecoder.from_pretrained(str(tmp_path), drafts=["ngram"], compile=True)
    assert "states choose which packed experts are read, and a graph cannot" in made.passes


def test_only_chosen_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, *CASES["awq"], "qwen3_moe", **MOE)
    model, read = loading.load(tmp_path).model, []
    for path, module in model.named_modules():
        if path.endswith("gate_proj"):
            module.register_forward_hook(lambda module, given, _: read.append(len(given[0])))
    model(IDS[:1, :1])
    assert read == [1] * 4  # two of eight, in two layers
    read.clear()
    model(IDS)
    assert sum(read) == 2 * 2 * IDS.numel()


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.7.up_proj"
    more: dict[str, Tensor | None] = {f"{name}.{leaf}": None for leaf in ("qweight", "qzeros", "scales")}
    checkpoint(tmp_path, *CASES["awq"], "qwen3_moe", more=more, **MOE)
    assert f"lacks 1 tensors ({name}.weight)" in refusal(tmp_path)
    more = {f"{name.replace('7', '8')}.qweight": torch.zeros(128, 8).int()}
    checkpoint(tmp_path, *CASES["awq"], "qwen3_moe", more=more, **MOE)
    assert "1 of its tensors are not known (model.layers.1.mlp.experts.8.up_proj.qweight)" in refusal(tmp_path)


# ---- gpt-oss ----


@torch.no_grad()
def gpt_oss(folder: Path, more: dict[str, Tensor | None] | None = None) -> Any:
    """Write a checkpoint as OpenAI does; return the dense model in float32."""
    config = GptOssConfig(
        **{**SIZES, "head_dim": 32, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        sliding_window=5,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).float().eval()
    found: dict[str, Tensor | None] = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 3:
            outputs, groups = weight.shape[2], weight.shape[1] // 32
            blocks = torch.randint(256, (4, outputs, groups, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (4, outputs, groups), dtype=torch.uint8)
            digits = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
            numbers = (
                VALUES[(digits & 7).int()] * (1 - 2 * (digits >> 3).float()) * 2.0 ** (scales[..., None].int() - 127)
            )
            weight.copy_(numbers.flatten(2).transpose(1, 2))
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            weight.copy_((torch.randn_like(weight) / 8 + ("norm" in name)).bfloat16())
            found[name] = weight.bfloat16()
    found |= more or {}
    write(folder, {name: each for name, each in found.items() if each is not None})
    config.save_pretrained(folder)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))
    byte_tokenizer().save_pretrained(folder)
    return model


def test_gpt_oss_is_packed(tmp_path: Path) -> None:
    wanted = gpt_oss(tmp_path)
    model = loading.load(tmp_path).model
    for layer, theirs in zip(model.model.layers, wanted.model.layers, strict=True):
        experts = layer.mlp.experts
        assert type(experts) is Experts
        for number, (both, down) in enumerate(
            zip(theirs.mlp.experts.gate_up_proj, theirs.mlp.experts.down_proj, strict=True)
        ):
            own = experts[number]
            assert torch.equal(weight_of(own["gate_proj"]), both.T[::2])
            assert torch.equal(weight_of(own["up_proj"]), both.T[1::2])
            assert torch.equal(weight_of(own["down_proj"]), down.T)
            assert torch.equal(own["up_proj"].bias, theirs.mlp.experts.gate_up_proj_bias[number, 1::2])
    assert sum(type(module) is PackedLinear for module in model.modules()) == 2 * 4 * 3
    near(model, wanted)
    texts_are_the_same(str(tmp_path))


DAMAGED = {
    "no scales": ("down_proj_scales", None, "lacks 4 tensors (model.layers.1.mlp.experts.0.down_proj.scales"),
    "an odd row": ("gate_up_proj_blocks", torch.zeros(4, 127, 4, 16).byte(), "up_proj.blocks has shape (63, 4, 16)"),
    "too few experts": ("down_proj_scales", torch.zeros(3, 128, 2).byte(), "lacks 1 tensors (model.layers.1.mlp"),
    "no number": (
        "down_proj_scales",
        torch.full((4, 128, 2), 255).byte(),
        "experts.0.down_proj: a scale is not a number",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_experts_of_gpt_oss_are_refused(tmp_path: Path, case: str) -> None:
    leaf, damaged, message = DAMAGED[case]
    gpt_oss(tmp_path, {f"model.layers.1.mlp.experts.{leaf}": damaged})
    assert message in refusal(tmp_path)


# ---- GGUF ----

EXPERTS = {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 32}


def qwen3moe(**options: Any) -> Any:
    """A random dense model, of the sizes of `metadata`."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**IN_FILES, **MOE, "moe_intermediate_size": 32, "head_dim": 16, **options})
    return Qwen3MoeForCausalLM(config).float().eval()


@pytest.mark.parametrize("form", ["Q8_0", "F16"])
def test_experts_of_files(tmp_path: Path, form: str) -> None:
    wanted = qwen3moe(rms_norm_eps=0.0078125, initializer_range=0.2)
    path = written(tmp_path, metadata("qwen3moe", **EXPERTS), tensors(wanted, form))
    model = loading.load(path).model
    own = dict(model.named_modules())
    assert all(torch.equal(weight_of(own[path]), weight) for path, weight in matrices(wanted))
    assert sum(type(module) is PackedLinear for module in own.values()) == (form == "Q8_0") * (2 * (4 + 8 * 3) + 1)
    near(model, wanted, IDS % len(TOKENS))
    texts_are_the_same(str(path))


BLOCK = Made(0, (1,), bytes(4))
LIES = {
    "no experts": (dict.fromkeys(EXPERTS), {}, "lacks qwen3moe.expert_count"),
    "other scores": ({"qwen3moe.expert_gating_func": 2}, {}, "qwen3moe.expert_gating_func, which is not read"),
    "more experts": (EXPERTS | {"qwen3moe.expert_count": 9}, {}, r"lacks 6 tensors .*experts\.8\.down_proj"),
    "experts without end": (
        EXPERTS | {"qwen3moe.expert_count": 1 << 31},
        {},
        "should have 2147483648 experts, and the",
    ),
    "fewer experts": (EXPERTS | {"qwen3moe.expert_count": 7}, {}, r"6 of its tensors are not known .*experts\.7"),
    "no rows": ({}, {"blk.1.ffn_up_exps.weight": BLOCK}, "its tensors are not known"),
    "biases": ({}, {"blk.1.ffn_up_exps.bias": Made(0, (8, 32), bytes(1024))}, "8 of its tensors are not known"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_whose_experts_are_not_the_models_are_refused(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, more, message = LIES[lie]
    keys = {name: value for name, value in metadata("qwen3moe", **(EXPERTS | keys)).items() if value is not None}
    monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)
    with pytest.raises(ModelError, match=message):
        loading.load(written(tmp_path, keys, tensors(qwen3moe()) | more))
