"""A model's configuration, from the metadata of a file and the shapes of its tensors.

Knows: how the architectures name their sizes, which of their scalings of rotary frequencies transformers has.
Does not know: weights, tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specinfer.attention.packed.formats import dense
from specinfer.attention.packed.gguf import Stored
from specinfer.checkpoints.keys import ROLES, Keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# as ggml and as transformers name them; mistral is a llama to ggml
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
ROTARY = "rope_freqs.weight"  # what divides rotary frequencies, in files of Llama 3.1 and later
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_SIZES_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# what Llama 3's scaling has besides its factor, which files do not say
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def configuration(keys: Keys, tensors: Mapping[str, Stored]) -> PreTrainedConfig:
    """Return a model's configuration.

    Raises:
        ModelError: an architecture or an option of it that is not known, or sizes that are missing or contradict
            each other.
    """
    from transformers import AutoConfig

    if (kind := keys.get("general.type", str, "model")) != "model":
        raise keys.refusal(f"it is of type {kind!r:.40}", "give the file of a model")
    if keys.architecture not in ARCHITECTURES:
        advice = f"these work: {', '.join(ARCHITECTURES)} (mistral is a llama); load the original model otherwise"
        raise keys.refusal(f"its architecture is {keys.architecture!r:.40}", advice)
    has_experts = keys.architecture == "qwen3moe"
    names = _SIZES | (_SIZES_OF_EXPERTS if has_experts else {})
    sizes = {name: keys.of_model(key, int) for key, name in names.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    sizes["num_key_value_heads"] = keys.of_model("attention.head_count_kv", int, heads)
    sizes["head_dim"] = head = keys.of_model("attention.key_length", int, hidden // (heads or 1))
    if min(sizes.values()) < 1:
        raise keys.refusal(f"sizes of its metadata are not positive: {sizes}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.of_model(key, int, head)) != head:
            raise keys.refusal(f"{key} is {found}, and must be {head}, as for keys", "use another model")
    if "token_embd.weight" not in tensors:
        raise keys.refusal("it has no tensor token_embd.weight")
    layers = {int(part[1]) for name in tensors if (part := re.match(r"blk\.(\d+)\.", name))}
    if len(layers) != sizes["num_hidden_layers"] or layers != set(range(len(layers))):
        raise keys.refusal(f"its metadata says {sizes['num_hidden_layers']} layers, its tensors are of {len(layers)}")
    roles = {f"{role}_id": keys.get(key, int) for role, key in ROLES.items() if key in keys and role != "unk_token"}
    config = AutoConfig.for_model(
        ARCHITECTURES[keys.architecture],
        **sizes,
        vocab_size=tensors["token_embd.weight"].shape[0],
        rms_norm_eps=keys.of_model("attention.layer_norm_rms_epsilon", float),
        rope_parameters=_rotary(keys, tensors.get(ROTARY)),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        dtype="float32",
        name_or_path=str(keys.path),
        **roles,
        **({"norm_topk_prob": True} if has_experts else {}),  # as llama.cpp multiplies; files do not say it
    )
    if ROTARY in tensors:
        _check_rotary(keys, config, dense(tensors[ROTARY].kind, tensors[ROTARY].rows)[0])
    return config


def ends(keys: Keys) -> list[int]:
    """Return the ids of tokens that end a text or a turn, as `generation_config.eos_token_id`."""
    names = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    return list(dict.fromkeys(keys.get(name, int) for name in names if name in keys))


def _rotary(keys: Keys, factors: Stored | None) -> dict[str, float | str]:
    """Return rotary parameters, as transformers has them."""
    found: dict[str, float | str] = {
        "rope_type": "default",
        "rope_theta": keys.of_model("rope.freq_base", float, 10000.0),
    }
    kind = keys.of_model("rope.scaling.type", str, "none")
    if kind == "yarn":
        context = keys.of_model("context_length", int)
        before = keys.of_model("rope.scaling.original_context_length", int, context)
        found |= {"rope_type": "yarn", "original_max_position_embeddings": before}
    elif kind == "linear":
        found["rope_type"] = "linear"
    elif kind != "none":
        raise keys.refusal(f"its rotary scaling is {kind!r:.40}", "none, linear and yarn work: use another file")
    if kind != "none":
        found["factor"] = keys.of_model("rope.scaling.factor", float)
    if factors is not None:
        factor = float(dense(factors.kind, factors.rows).max())
        if factor > 1:
            found |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return found


def _check_rotary(keys: Keys, config: PreTrainedConfig, factors: Tensor) -> None:
    """Raise `ModelError` unless the factors of a file are those of the configuration's frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, theta = config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]
    fits = 2 * len(factors) == config.head_dim
    if fits:
        plain = 1 / theta ** (torch.arange(len(factors)).float() / len(factors))
        scaled = plain if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config)[0]
        fits = torch.allclose(scaled * factors, plain, rtol=1e-4)
    if not fits:
        raise keys.refusal(f"{ROTARY} has other factors than Llama 3's", "load the original model")
