"""Multi-token prediction layers: what transformers computes along a path, and what a decoder does with them."""

import gc

import pytest
import torch
from conftest import PROMPTS, VOCAB, byte_tokenizer, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

from specinfer import BestFirst, Chain, Expansion, SpeculativeDecoder
from specinfer.drafts.published import mtp
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.mtp import MtpDraft
from specinfer.errors import ModelError

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES = {"deepseek_v3": LATENT, "glm4_moe": {"head_dim": 8}}
NORMED, RAW = (Convention((2,), (("chains_normed", choice),)) for choice in (True, False))
LAYER = r"model\.layers\.2\..*"  # where a target of two layers has the third, as 61 in DeepSeek-V3


@pytest.fixture(autouse=True)
def small_models_have_such_layers(monkeypatch):
    for family in (DeepseekV3ForCausalLM, Glm4MoeForCausalLM):
        monkeypatch.setattr(family, "_keys_to_ignore_on_load_unexpected", [LAYER])


def released(weights):
    """Name the weights of `MtpModel` as released files do: the layer after the last, an expert at a time."""
    found = {}
    for name, weight in weights.items():
        if not name.startswith("layers.0."):
            continue
        name = "model." + name.replace("layers.0.", "layers.2.").replace(".mtp_block.", ".")
        name = name.replace(".post_norm.", ".shared_head.norm.")
        parts = {name: weight}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            gates, ups = weight.chunk(2, 1)
            parts = {f"{stem}.{e}.gate_proj.weight": w for e, w in enumerate(gates)}
            parts |= {f"{stem}.{e}.up_proj.weight": w for e, w in enumerate(ups)}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            parts = {f"{stem}.{e}.down_proj.weight": w for e, w in enumerate(weight)}
        found |= {part: w.clone().contiguous() for part, w in parts.items()}
    copies = {"embed_tokens": "embed_tokens", "shared_head": "shared_head.head"}  # of the target's matrices
    return found | {f"model.layers.2.{to}.weight": weights[f"{of}.weight"].clone() for of, to in copies.items()}


def write(folder, family, seed=0, change=lambda target, layer: None, dtype=torch.float32):
    """Write a random target with its layer; return the layer's weights as `MtpModel` names them."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **HEADS, **SPECIAL, **MOE, "n_shared_experts": 1, "first_k_dense_replace": 1, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **sizes, num_nextn_predict_layers=1, initializer_range=0.25)
    target = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer = MtpModel(target, 1).to(dtype)
    with torch.no_grad():
        for weight in layer.layers.state_dict().values():  # transformers leaves some as they are in memory
            weight.normal_(std=0.25)
        for part in (target, layer):
            for name, weight in part.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
        change(target, layer)
    target.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | released(layer.state_dict()), file, {"format": "pt"})
    return layer.state_dict()


def read(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


class Along:
    """Log-probabilities along a path, by transformers' own layer: causal, one token after another."""

    def __init__(self, target, convention):
        self.target, self.layers = target, MtpModel.from_pretrained(target).eval()
        self.normed = dict(convention.options)["chains_normed"]
        self.layers.layers[0].post_norm.register_forward_hook(
            lambda _, given, output: setattr(self, "states", output if self.normed else given[0])
        )

    @torch.no_grad()
    def after(self, ids, path):
        """The distribution after each token of the path, root included, (n + 1, V)."""
        states = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][:, :-1]
        cache, found = DynamicCache(), []
        position, tokens = torch.arange(1, len(ids))[None], torch.tensor([ids[1:]])
        for token in [*path, None]:
            _, logits, _ = self.layers(tokens, states, torch.ones_like(tokens), position, cache)
            found.append(logits[0, -1].log_softmax(-1))
            states = self.states[:, -1:]
            position, tokens = position[:, -1:] + 1, torch.tensor([[token]]) if token is not None else None
        return torch.stack(found)


@pytest.mark.parametrize("seed", range(20))
def test_every_node_is_what_transformers_computes_along_its_path(seed, tmp_path):
    convention = (NORMED, RAW)[seed // 2 % 2]
    write(tmp_path, list(FAMILIES)[seed % 2], seed)
    target, checked = read(tmp_path), 0
    along = Along(target, convention)
    decoder = SpeculativeDecoder(target, None, [MtpDraft(convention)], Expansion((2, 2, 1)))
    for emitted in decoder.open([PROMPTS[0], PROMPTS[3]], max_new_tokens=4):
        for row, step in emitted:
            ids = row.ids[: len(row.ids) - len(step.tokens)]
            for leaf in set(range(1, len(step.tree))) - set(step.tree.parents.tolist()):
                path = step.tree.path(leaf)
                wanted = along.after(ids, path)
                while leaf:
                    depth, parent = int(step.tree.depths[leaf]), int(step.tree.parents[leaf])
                    edge = float(step.tree.scores[leaf] - step.tree.scores[parent])
                    assert edge == pytest.approx(float(wanted[depth - 1, path[depth - 1]]), abs=1e-5)
                    leaf, checked = parent, checked + 1
    assert checked >= 32


def test_weights_are_read_as_they_were_and_the_target_is_not_changed(tmp_path):
    """A model converted after it was loaded gets a layer of its type."""
    weights = write(tmp_path, "deepseek_v3")
    target = read(tmp_path)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    target.double()
    network = mtp.load(target)
    for name, weight in network.model.layers.state_dict().items():
        assert torch.equal(weight, weights[f"layers.{name}"].double()), name
    assert network.model.embed_tokens is target.model.embed_tokens
    assert network.model.shared_head is target.lm_head
    assert all(torch.equal(weight, before[name].double()) for name, weight in target.state_dict().items())
    assert any(weight.requires_grad for weight in target.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target whose next token depends on its last one alone, and whose layer knows it exactly."""

    def change(target, layer):
        for part in (target, layer):
            for name, weight in part.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.zero_()
                elif "norm" in name:
                    weight.fill_(1.0)
        layer.layers[0].eh_proj.weight.copy_(torch.eye(32, 64))  # the token's embedding, and nothing of the state

    folder = tmp_path_factory.mktemp("exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [LAYER])
        write(folder, "glm4_moe", change=change)
    return folder


def test_the_word_loads_and_measures_the_targets_layer(folder, monkeypatch, tmp_path):
    """Both ways to chain are exact here: the tie is told, and the record is read again."""
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    for _ in range(2):
        decoder = SpeculativeDecoder.from_pretrained(folder, drafts=["mtp"], tree=Chain(4), dtype="float32")
        (draft,) = decoder.drafts
        assert [rates for _, rates in draft.agreements] == [[1.0] * 4] * 2
        assert "as good: " in "; ".join(decoder.notes)
    result = decoder.generate([7, 8], max_new_tokens=25)
    assert len(result.steps) == 5
    assert list(tmp_path.glob("drafts/mtp-*.json"))


@pytest.mark.parametrize("tree", [BestFirst(8, 4), "auto"], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["ragged", "one"])
def test_ids_do_not_depend_on_the_layer(folder, tree, temperature, prompts):
    target = read(folder)
    options = {"max_new_tokens": 12, "temperature": temperature, "seed": list(range(len(prompts)))}
    wanted = SpeculativeDecoder(target, None, [], None).generate(prompts, **options)
    found = SpeculativeDecoder(target, None, [MtpDraft(NORMED), "ngram"], tree).generate(prompts, **options)
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
    gc.collect()


def lines(call):
    with pytest.raises(ModelError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_read_is_one_line(tmp_path):
    assert "no multi-token prediction layer that transformers knows (llama)" in lines(
        lambda: SpeculativeDecoder(tiny_llama(), None, ["mtp"])
    )
    write(tmp_path, "glm4_moe")
    target = read(tmp_path)
    target.config.quantization_config = {"quant_method": "fp8"}
    assert "is quantised" in lines(lambda: mtp.load(target))
    assert "is quantised" in lines(lambda: SpeculativeDecoder.from_pretrained(str(tmp_path), ["mtp"], quantize="int8"))
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: w for name, w in whole.items() if "hnorm" not in name}, file, {"format": "pt"})
    assert "layers.0.hnorm.weight" in lines(lambda: mtp.load(read(tmp_path)))
    target = read(tmp_path)
    file.unlink()
    assert "cannot load the multi-token prediction layer" in lines(lambda: mtp.load(target))
    assert "give it to a decoder" in lines(lambda: MtpDraft().open(None))


def test_a_random_layer_is_refused_with_numbers(tmp_path):
    write(tmp_path, "deepseek_v3")
    assert "draft mtp does not fit this target" in lines(lambda: SpeculativeDecoder(read(tmp_path), None, ["mtp"]))
