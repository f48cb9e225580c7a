"""Models from GGUF files: tiny random ones are written as llama.cpp's converter writes them, and read again."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Made, gguf, stored
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specinfer import SpeculativeDecoder, cli, loading
from specinfer.attention.compiler.watch import altered
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.checkpoints.gguf import load_gguf
from specinfer.errors import ModelError

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "12", "<|end|>", "<|turn|>", "<mark>", "[PAD262]"]
TYPES = [1] * 259 + [3, 3, 4, 5]
END, TURN = 259, 260
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS) + 1,  # embeddings are padded
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
NAMES = {  # transformers' parts of a name, and ggml's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": ["t h", "th e", "1 2"],
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.eot_token_id": TURN,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}",
}


def reference(kind: str = "llama", **options: Any) -> Any:
    """A random model whose heads are wider than hidden_size / heads, if it may say so."""
    config, model = CLASSES[kind]
    torch.manual_seed(0)
    made = model(config(**{**SIZES, "head_dim": 16, "initializer_range": 0.2, **options})).float().eval()
    for name, weight in made.named_parameters():
        if weight.dim() == 1:  # norms and biases would be ones and zeros
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
    return made


def metadata(kind: str = "llama", **options: Any) -> dict[str, Any]:
    return {
        "general.architecture": kind,
        "general.name": "a random model",
        f"{kind}.context_length": 128,
        f"{kind}.block_count": 2,
        f"{kind}.embedding_length": 64,
        f"{kind}.feed_forward_length": 96,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": 2,
        f"{kind}.attention.layer_norm_rms_epsilon": 0.0078125,
        f"{kind}.attention.key_length": 16,
        f"{kind}.rope.freq_base": 20000.0,
        f"{kind}.vocab_size": len(TOKENS),
        **TOKENIZER,
        **options,
    }


def tensors(model: Any, form: str = "Q8_0") -> dict[str, Made]:
    """Return a model's weights as a file has them, and give the model the numbers that they have there."""
    found = {}
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name in [name for name in state if "experts" in name]:  # of all experts, gates apart
        weight, names = state.pop(name), ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        path = name.rpartition(".")[0]
        state |= {f"{path}.{own}.weight": part for own, part in zip(names, weight.chunk(len(names), 1), strict=True)}
    for name, weight in state.items():
        is_dense = weight.dim() == 1 or "mlp.gate." in name
        made, numbers = stored(ordered(model, name, weight), "F32" if is_dense else form)
        weight.copy_(restored(model, name, numbers))
        short = name
        for theirs, ours in NAMES.items():
            short = short.replace(theirs, ours, 1) if re.search(rf"(^|\.){re.escape(theirs)}\.", short) else short
        found[short] = made
    return found


def ordered(model: Any, name: str, weight: Tensor) -> Tensor:
    """Rows as llama.cpp's converter has them: halves of heads are interleaved."""
    if model.config.model_type != "llama" or not re.search("[qk]_proj", name):
        return weight
    heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def restored(model: Any, name: str, weight: Tensor) -> Tensor:
    if model.config.model_type != "llama" or not re.search("[qk]_proj", name):
        return weight
    heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def written(
    folder: Path, keys: Mapping[str, Any] | None = None, weights: Mapping[str, Made] | None = None, name: str = "m.gguf"
) -> Path:
    path = folder / name
    path.write_bytes(gguf(metadata() if keys is None else keys, tensors(reference()) if weights is None else weights))
    return path


IDS = torch.randint(len(TOKENS), (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_computes_what_its_numbers_say(tmp_path: Path, kind: str, tied: bool) -> None:
    wanted = reference(kind, tie_word_embeddings=tied, rms_norm_eps=0.0078125)
    path = written(tmp_path, metadata(kind), tensors(wanted))
    model, _ = load_gguf(path)
    with torch.inference_mode():
        logits, theirs = model(IDS).logits, wanted(IDS).logits
    assert (logits - theirs).abs().max() < 1e-3 * theirs.std()
    assert type(model) is type(wanted)
    assert not model.training
    assert model.name_or_path == model.config._name_or_path == str(path)
    assert model.config.tie_word_embeddings == tied


@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_packed_and_nothing_is_there_twice(tmp_path: Path, tied: bool) -> None:
    model, _ = load_gguf(written(tmp_path, None, tensors(reference(tie_word_embeddings=tied))))
    assert sum(type(module) is PackedLinear for module in model.modules()) == 2 * 7 + 1
    assert sum(type(module) is PackedEmbedding for module in model.modules()) == 1
    assert not any(type(module) in (nn.Linear, nn.Embedding) for module in model.modules())
    assert (model.lm_head.packed is model.model.embed_tokens.packed) == tied
    assert {name.rpartition(".")[2] for name, _ in model.named_parameters()} == {"weight"}
    assert all(parameter.dim() == 1 and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(held.is_meta for held in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_tensors_are_dense_modules(tmp_path: Path, form: str, tied: bool) -> None:
    wanted = reference(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, rms_norm_eps=0.0078125)
    model, _ = load_gguf(written(tmp_path, None, tensors(wanted, form)))
    state, theirs = model.state_dict(), wanted.state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], theirs[name]) for name in state)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_quantised_tensors_are_read_as_dense_ones(tmp_path: Path, tied: bool) -> None:
    """Their numbers are rounded, as all are; the default target is made so."""
    wanted = reference(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, rms_norm_eps=0.0078125)
    model, _ = load_gguf(written(tmp_path, None, tensors(wanted)), torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    state, theirs = model.state_dict(), wanted.bfloat16().state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], theirs[name]) for name in state)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
    assert not altered(model)
    assert model(IDS).logits.isfinite().all()


def test_biases_of_packed_layers_are_dense(tmp_path: Path) -> None:
    wanted = reference("qwen2")
    model, _ = load_gguf(written(tmp_path, metadata("qwen2"), tensors(wanted)))
    layer, theirs = model.model.layers[1].self_attn, wanted.model.layers[1].self_attn
    assert type(layer.q_proj) is PackedLinear
    assert torch.equal(layer.q_proj.bias, theirs.q_proj.bias)
    assert not layer.q_proj.bias.requires_grad
    assert layer.o_proj.bias is None


def test_all_tokens_that_end_a_turn_end_a_text(tmp_path: Path) -> None:
    model, tokenizer = load_gguf(written(tmp_path))
    assert model.generation_config.eos_token_id == [END, TURN]
    assert model.config.eos_token_id == tokenizer.eos_token_id == END


def test_a_model_in_parts(tmp_path: Path) -> None:
    weights = tensors(reference())
    names = list(weights)
    head = metadata() | {"split.no": 0, "split.count": 2, "split.tensors.count": len(names)}
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(gguf(head, {name: weights[name] for name in names[:5]}))
    rest = {"split.no": 1, "split.count": 2}
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(gguf(rest, {name: weights[name] for name in names[5:]}))
    model, _ = load_gguf(tmp_path / "m-00001-of-00002.gguf")
    whole, _ = load_gguf(written(tmp_path, None, weights))
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    (tmp_path / "m.gguf").unlink()
    assert loading.gguf_file(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"


# ---- rotary frequencies ----


def llama3_factors(config: Any) -> Tensor:
    """What divides frequencies, as files of Llama 3 have it."""
    plain = 1 / 20000.0 ** (torch.arange(0, 16, 2).float() / 16)
    return plain / ROPE_INIT_FUNCTIONS["llama3"](config)[0]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 20000.0}


def with_factors(model: Any, factors: Tensor) -> dict[str, Made]:
    return tensors(model) | {"rope_freqs.weight": Made(0, (len(factors),), factors.numpy().tobytes())}


def test_factors_of_frequencies_are_llama_3s(tmp_path: Path) -> None:
    wanted = reference(rope_parameters=LLAMA3)
    factors = llama3_factors(wanted.config)
    assert factors.max() == 8
    assert 1 < factors[-2] < 8 or factors.unique().numel() > 2
    model, _ = load_gguf(written(tmp_path, None, with_factors(wanted, factors)))
    assert model.config.rope_parameters == LLAMA3
    assert torch.equal(model.model.rotary_emb.inv_freq, wanted.model.rotary_emb.inv_freq)


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    model, _ = load_gguf(written(tmp_path, None, with_factors(reference(), torch.ones(8))))
    assert model.config.rope_parameters == SIZES["rope_parameters"]


@pytest.mark.parametrize("factors", [torch.linspace(1, 8, 8), torch.linspace(1, 0.5, 8), torch.ones(4)])
def test_other_factors_are_refused(tmp_path: Path, factors: Tensor) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has other factors than Llama 3's"):
        load_gguf(written(tmp_path, None, with_factors(reference(), factors)))


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_scaling_of_frequencies(tmp_path: Path, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    model, _ = load_gguf(written(tmp_path, metadata(**keys)))
    assert model.config.rope_parameters == {"rope_theta": 20000.0, **wanted}
    theirs = reference(rope_parameters={"rope_theta": 20000.0, **wanted}).model.rotary_emb
    assert torch.equal(model.model.rotary_emb.inv_freq, theirs.inv_freq)
    assert model.model.rotary_emb.attention_scaling == theirs.attention_scaling


# ---- what is refused ----


def without(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != name}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (without(metadata(), "general.architecture"), "lacks general.architecture"),
        (metadata(**{"general.type": "adapter"}), "it is of type 'adapter'; give the file of a model"),
        ({"general.architecture": "mamba"}, "architecture is 'mamba'; these work: llama, qwen2, qwen3"),
        (without(metadata(), "llama.block_count"), "lacks llama.block_count"),
        (metadata(**{"llama.block_count": "2"}), "llama.block_count is '2', and should be of type int"),
        (metadata(**{"llama.block_count": 10**9}), "says 1000000000 layers, its tensors are of 2"),
        *(
            (metadata(**{f"llama.attention.{size}": 0}), "sizes of its metadata are not positive")
            for size in ("head_count", "head_count_kv", "key_length")
        ),
        (
            metadata(**{"llama.attention.head_count_kv": [2, 2]}),
            r"head_count_kv is \[2, 2\], and should be of type int",
        ),
        (metadata(**{"llama.attention.value_length": 8}), "value_length is 8, and must be 16"),
        (metadata(**{"llama.rope.dimension_count": 8}), "dimension_count is 8, and must be 16"),
        (metadata(**{"llama.rope.scaling.type": "longrope"}), "rotary scaling is 'longrope'; none, linear and yarn"),
        (metadata(**{"llama.attention.scale": 0.5}), "metadata has llama.attention.scale, which is not read"),
        (metadata(**{"llama.expert_count": 8}), "metadata has llama.expert_count, which is not read"),
        (metadata(**{"tokenizer.ggml.normaliser": "x"}), "metadata has tokenizer.ggml.normaliser, which is not read"),
        (metadata(**{"llama.feed_forward_length": 128}), r"has shape \(96, 64\), and should have \(128, 64\)"),
        (metadata(**{"tokenizer.ggml.model": "bert"}), "tokenizer is 'bert'; gpt2 and llama work"),
        (
            metadata(**{"tokenizer.ggml.pre": "default"}),
            "split in the way of 'default'; these are known: gpt-2, smollm",
        ),
        (without(metadata(), "tokenizer.ggml.pre"), "split in the way of 'nothing'"),
        (metadata(**{"tokenizer.ggml.tokens": [1]}), r"tokens is \[1\], and should be an array of type str"),
        (metadata(**{"tokenizer.ggml.token_type": [1]}), "it has 263 tokens and 1 token types"),
        (metadata(**{"tokenizer.ggml.eos_token_id": 263}), "eos_token_id is 263, and there are 263 tokens"),
        (metadata(**{"tokenizer.ggml.remove_extra_whitespaces": True}), "remove_extra_whitespaces is true"),
        (metadata(**{"tokenizer.ggml.merges": ["t h e"]}), "'t h e' among its merges is not a pair"),
        (metadata(**{"tokenizer.ggml.merges": ["no tokens"]}), "tokens and merges contradict each other .*`no`"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refusal:
        load_gguf(written(tmp_path, keys))
    assert str(refusal.value).startswith(f"cannot load {tmp_path / 'm.gguf'}: ")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_length", 66, "not a multiple of the number of attention heads"),
        ("attention.key_length", 15, "`head_dim`=15"),
        ("feed_forward_length", struct.pack("<IQ", 10, 1 << 63), "Overflow"),
    ],
)
def test_sizes_that_transformers_does_not_take_are_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    with pytest.raises(ModelError, match=f"cannot load {tmp_path / 'm.gguf'}: .*{message}"):
        loading.load(written(tmp_path, metadata(**{f"llama.{key}": value})))


def test_tensors_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    weights = tensors(reference())
    with pytest.raises(ModelError, match=r"1 of its tensors are not known \(blk\.1\.attn_sinks\.weight\)"):
        load_gguf(written(tmp_path, None, weights | {"blk.1.attn_sinks.weight": Made(0, (4,), bytes(16))}))
    with pytest.raises(ModelError, match=r"lacks 1 tensors \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load_gguf(
            written(tmp_path, None, {name: made for name, made in weights.items() if name != "blk.1.ffn_up.weight"})
        )
    with pytest.raises(ModelError, match=r"it has no tensor token_embd\.weight"):
        load_gguf(written(tmp_path, None, {}))


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    weights = tensors(reference())
    name = "blk.1.ffn_up.weight"
    damaged = weights[name]._replace(data=b"\xff\xff" + weights[name].data[2:])
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: a scale of Q8_0 is not a number"):
        load_gguf(written(tmp_path, None, weights | {name: damaged}))


def test_a_quantised_norm_is_refused(tmp_path: Path) -> None:
    quantised = Made(8, (64,), bytes(68))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: .*quantised, and should be dense"):
        load_gguf(written(tmp_path, None, tensors(reference()) | {"output_norm.weight": quantised}))


# ---- loading by name ----


def test_files_and_their_folders_are_names_of_targets_and_drafts(tmp_path: Path) -> None:
    path = written(tmp_path)
    loaded = loading.load(path)
    assert loaded.name == str(path)
    assert type(loaded.model.lm_head) is PackedLinear
    decoder = SpeculativeDecoder.from_pretrained(str(tmp_path), drafts=[path], compile=False)
    ids = torch.tensor([[5, 9, 17, 5, 9]])
    wanted = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    result = decoder.generate(ids[0].tolist(), max_new_tokens=12)
    assert list(result.token_ids) == wanted
    assert result.stats.target_passes < 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' is not possible for m.gguf: .*leave dtype out"),
        ({"dtype": "floot32"}, "unknown dtype 'floot32'"),
        ({"device": "meta"}, "unknown device 'meta'"),
        ({"device": "cuda:99"}, "no device 'cuda:99'"),
        ({"quantize": "int2"}, "quantize='int2' is unknown"),
        ({"tensor_parallel": 2}, "tensor_parallel is for models in safetensors, and m.gguf is a GGUF file: leave it"),
        ({"attn_implementation": "eager"}, "attn_implementation is for models in safetensors"),
    ],
)
def test_options_of_other_models_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loading.load(tmp_path / "m.gguf", **options)


def test_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.DEVICES, "cuda", lambda: 1)
    with pytest.raises(ModelError, match="device 'cuda:0' is not possible: GGUF files run on a CPU"):
        loading.load(tmp_path / "m.gguf", device="cuda:0")


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    assert loading.gguf_file(str(tmp_path)) is None
    assert loading.gguf_file("") is None
    assert loading.gguf_file("somebody/something-GGUF") is None
    for name in ("a-00001-of-00003.gguf", "a-00002-of-00003.gguf", "config.json"):
        (tmp_path / name).touch()
    assert loading.gguf_file(str(tmp_path)) == tmp_path / "a-00001-of-00003.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a-00001-of-00003.gguf, b.gguf\): name one of them"):
        loading.gguf_file(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert loading.gguf_file(str(tmp_path)) is None


def test_a_file_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is packed."""
    monkeypatch.setattr("specinfer.checkpoints.filling.free_bytes", lambda: 1000.0)
    monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)
    with pytest.raises(ModelError, match=r"its weights need 0\.0 GB of memory, and 0\.0 GB are free: end other"):
        load_gguf(written(tmp_path))


def changed(name: str) -> bytes:
    """A file that is right but for one thing."""
    keys, weights = metadata(), tensors(reference())
    if name == "no tokenizer":
        keys = {key: value for key, value in keys.items() if not key.startswith("tokenizer")}
    if name == "a format of number 99":
        weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"]._replace(kind=99)
    if name == "a format that is not read":
        weights["blk.1.ffn_up.weight"] = Made(19, (96, 256), bytes(96 * 50))
    if name == "another size":
        weights["blk.1.ffn_up.weight"] = stored(torch.zeros(96, 32), "Q8_0")[0]
    if name == "more than memory":
        weights["blk.1.ffn_up.weight"] = Made(0, (2**20, 2**20), b"")
    whole = gguf(keys, weights)
    return {"cut in its header": whole[:2000], "cut in its tensors": whole[:-1]}.get(name, whole)


CHANGED = {
    "cut in its header": "it should hold 263 texts in 'tokenizer.ggml.tokens', and has no room for them; the file",
    "cut in its tensors": "and the file at",
    "no tokenizer": "lacks tokenizer.ggml.",
    "a format of number 99": "has format number 99, which is not read; take a file with",
    "a format that is not read": "has format IQ1_S, which is not read; take a file with",
    "another size": "has shape (96, 32), and should have (96, 64)",
    "more than memory": "'blk.1.ffn_up.weight' ends at byte",
    "": "its weights need 0.0 GB of memory, and 0.0 GB are free: end other programs",
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_command_line_refuses_files_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is packed."""
    (tmp_path / "m.gguf").write_bytes(changed(name))
    monkeypatch.setattr("specinfer.checkpoints.filling.pack", None)
    if not name:
        monkeypatch.setattr("specinfer.checkpoints.filling.free_bytes", lambda: 1000.0)
    arguments = ["generate", "aa", "--target", str(tmp_path / "m.gguf"), "--draft", "ngram"]
    monkeypatch.setattr("sys.argv", ["specinfer", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = "".join(capsys.readouterr())
    assert ended.value.code == 2
    assert CHANGED[name] in told
    assert told.count("\n") == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none\.gguf: No such file"):
        loading.load(tmp_path / "none.gguf")
