"""Published block heads: DFlash, JetSpec, DFlash 2, DSpark and Domino, in the formats that z-lab, DeepSpec, SpecForge
and vLLM's speculators write.

Knows: their configurations and names of weights.  Does not know: their networks, how they draft (a module each).

All are Qwen3 layers over the slots of a block.  z-lab and SpecForge keep what is special in ``dflash_config``, DeepSpec
and speculators beside the sizes.  The former name layers by number, so id i is the output of layer i; speculators
names the hidden states themselves.
"""

import re
from collections.abc import Callable, Mapping

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from specinfer.drafts.published.block import BlockSession, PathSession
from specinfer.drafts.published.checkpoint import Checkpoint, assign, renamed, vocabulary
from specinfer.drafts.published.dflash2 import DFlash2Network
from specinfer.drafts.published.dflash_network import FULL, SLIDING, DFlashNetwork
from specinfer.drafts.published.domino import DominoNetwork
from specinfer.drafts.published.dspark import DSparkNetwork
from specinfer.drafts.published.layers import network_config
from specinfer.drafts.published.network import OpenSession
from specinfer.errors import one_line

# of layers that are Qwen3's, whoever names them
TYPES: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("layer_types", "sliding_window", "rope_parameters"),
)
OLDER = ("rope_theta", "rope_scaling", "use_sliding_window", "max_window_layers")  # of configurations before 5.0
MARKOV_HEADS = ("vanilla", "gated", "rnn")


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a block head."""
    return "dflash_config" in checkpoint.config or any(kind in _labels(checkpoint) for kind in (*KINDS, "jetspec"))


def load(checkpoint: Checkpoint) -> tuple[DFlashNetwork, OpenSession]:
    """Load a block head: its network, and the function that opens a session.

    Raises:
        ModelError: something is missing, unknown, damaged, or cannot be honoured.
    """
    kind = next((kind for kind in KINDS if kind in _labels(checkpoint)), "dflash")
    options = _options(checkpoint)
    fields = _fields(_layers(checkpoint), options, kind)
    network_type, special_fields = KINDS[kind]
    config = network_config(**fields, **special_fields(options))
    weights = renamed(checkpoint.weights, _current_name)
    if kind == "dspark":  # its confidence in tokens is not asked for: trees are cut by probability
        weights = {name: weight for name, weight in weights.items() if not name.startswith("confidence_head.")}
    ids = vocabulary(checkpoint, weights, config.vocab_size)
    if kind == "dflash2" and ids is not None:
        raise checkpoint.refuse("it has d2t, and a DFlash 2 head's selector knows the whole vocabulary only")
    has = {what: f"{name}.weight" in weights for what, name in (("embeds", "embed_tokens"), ("outputs", "lm_head"))}
    with torch.device("meta"):
        network = network_type(config, ids, **has)
    assign(checkpoint, network, weights)
    return network, PathSession if network.path_size else BlockSession


def _labels(checkpoint: Checkpoint) -> str:
    """Return everything that names the head's architecture."""
    config = checkpoint.config
    special = config.get("dflash_config")
    named = special.get("projector_type") if isinstance(special, dict) else None
    return f"{config.get('architectures')} {config.get('speculators_model_type')} {named}".lower()


def _options(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with one configuration, where ``dflash_config`` comes first."""
    special = checkpoint.config.get("dflash_config", {})
    if not isinstance(special, dict):
        raise checkpoint.refuse("its dflash_config is not a JSON object")
    return checkpoint.part({**checkpoint.config, **{name: v for name, v in special.items() if v is not None}})


def _fields(layers: PreTrainedConfig, options: Checkpoint, kind: str) -> dict[str, object]:
    """Return the fields of the configuration that every head has."""
    given, size = options.config, options.size("block_size")
    mask = given.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise options.refuse(f"its mask_token_id is {mask!r:.40}, not a token below {layers.vocab_size}")
    anchored = given.get("sample_from_anchor", given.get("shift_label"))
    by_default = kind == "dspark" and "dflash_config" not in given
    causal_types = _causal_types(options)
    if SLIDING in layers.layer_types and SLIDING not in causal_types and size > layers.sliding_window:
        window = layers.sliding_window
        raise options.refuse(f"its blocks of {size} slots are longer than its window of {window} tokens")
    return {name: getattr(layers, name, None) for name in SIZES} | {
        "block_size": size,
        "mask_token_id": mask,
        "target_layer_ids": _layer_ids(options, layers.num_hidden_layers),
        "layer_offset": 0 if "aux_hidden_state_layer_ids" in given else 1,
        "target_size": options.size("target_hidden_size", default=layers.hidden_size),
        "from_anchor": by_default if anchored is None else bool(anchored),
        "measured_anchor": anchored is None and kind != "domino",
        "causal_types": causal_types,
        "input_scale": float(given.get("input_embedding_scale") or 1),
        "output_scale": float(given.get("output_multiplier") or 1),
        "softcap": float(given.get("final_logit_softcapping") or 0),
        "qkv_bias": False,
        "qk_norm": True,
    }


def _layers(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return sizes and types of layers, with transformers' defaults where the checkpoint names none."""
    source = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    source = source if isinstance(source, dict) else {}
    if (model_type := source.get("model_type", "qwen3")) not in TYPES:
        raise checkpoint.refuse(f"its layers are of type {model_type!r:.40}, and only {', '.join(TYPES)} are known")
    if (checkpoint.folder / "mask_embedding.pt").exists():
        raise checkpoint.refuse("its mask token's embedding is in mask_embedding.pt, which is not supported")
    if "quantization_config" in checkpoint.config:
        raise checkpoint.refuse("it is quantised: take it in 16 bits")
    try:
        given = TYPES[model_type](**{name: source[name] for name in (*SIZES, *OLDER) if name in source})
        given.layer_types = list(getattr(given, "layer_types", None) or [FULL] * given.num_hidden_layers)
        rope = (given.rope_parameters or {}).get("rope_type", "default")
    except Exception as error:  # of any kind: transformers checks little
        raise checkpoint.refuse(f"its configuration is damaged: {one_line(error)}") from error
    if unknown := set(given.layer_types) - {FULL, SLIDING}:
        raise checkpoint.refuse(f"it has layers of type {min(unknown)!r:.40}, which are not known")
    if SLIDING in given.layer_types and not getattr(given, "sliding_window", None):
        raise checkpoint.refuse("its layers have sliding windows, and it does not say how long they are")
    if rope in ("dynamic", "longrope"):
        raise checkpoint.refuse(f"its positions are of type {rope!r}, which change with the length of the text")
    return given


def _layer_ids(options: Checkpoint, layers: int) -> list[int]:
    """Return the ids of the target's layers that the head reads; -1 is the embedding."""
    ids = options.config.get("aux_hidden_state_layer_ids", options.config.get("target_layer_ids"))
    if ids is None:
        last = options.size("num_target_layers") - 4
        return [(last + 4) // 2] if layers == 1 else [round(1 + i * last / (layers - 1)) for i in range(layers)]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= -1 for i in ids):
        raise options.refuse(f"the target's layers that it reads are {ids!r:.40}, not a list of numbers")
    return ids


def _causal_types(options: Checkpoint) -> list[str]:
    """Return the types of layers whose slots see no later ones: sliding ones, unless the configuration says otherwise.

    ``is_causal`` and sliding layers are z-lab's and SpecForge's, ``sliding_window_non_causal`` is speculators'.
    """
    given = options.config
    said = [given[name] for name in ("is_causal", "causal", "causal_head") if given.get(name) is not None]
    if said:
        return [FULL, SLIDING] if any(said) else []
    return [] if given.get("sliding_window_non_causal") else [SLIDING]


def _dflash2_fields(options: Checkpoint) -> Mapping[str, object]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    fields = {name: options.size(name) for name in names}
    if options.config["hidden_size"] % fields["conv_group_size"]:
        raise options.refuse(f"its conv_group_size {fields['conv_group_size']} does not divide its hidden_size")
    return fields


def _domino_fields(options: Checkpoint) -> Mapping[str, object]:
    fields = {name: options.size(name) for name in ("emb_dim", "gru_hidden_dim")}
    return {**fields, "pure_draft_prefix_len": int(options.config.get("pure_draft_prefix_len") or 0)}


def _dspark_fields(options: Checkpoint) -> Mapping[str, object]:
    """Return the size and the kind of the Markov head; speculators leaves out what is usual."""
    given = options.config
    rank = given.get("markov_rank", 256 if "speculators_model_type" in given else 0)
    kind = str(given.get("markov_head_type", "vanilla")).lower()
    if type(rank) is not int or rank < 0 or kind not in MARKOV_HEADS:
        raise options.refuse(f"its Markov head is {kind!r:.40} of rank {rank!r:.40}, which is not known")
    return {"markov_rank": rank, "markov_head_type": kind}


def _current_name(name: str) -> str:
    """Return a weight's current name; some trainers put a module around the heads, or wrap the codebooks."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    return re.sub(r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1", name)


# the networks of each kind, and how their own fields are read; the more special first
KINDS: dict[str, tuple[type[DFlashNetwork], Callable[[Checkpoint], Mapping[str, object]]]] = {
    "dflash2": (DFlash2Network, _dflash2_fields),
    "domino": (DominoNetwork, _domino_fields),
    "dspark": (DSparkNetwork, _dspark_fields),
    "dflash": (DFlashNetwork, lambda _: {}),
}
