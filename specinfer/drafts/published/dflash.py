"""Published block heads: DFlash, JetSpec, DFlash 2, DSpark and Domino, in the formats that z-lab, DeepSpec, SpecForge
and vLLM's speculators write.

Knows: their configurations and names of weights.  Does not know: their networks, how they draft (a module each).

All are Qwen3 layers over the slots of a block.  z-lab and SpecForge keep what is special in ``dflash_config``, DeepSpec
and speculators beside the sizes.  The former name layers by number, so id i is the output of layer i; speculators
names the hidden states themselves.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from specinfer.drafts.published.block import BlockSession, PathSession
from specinfer.drafts.published.checkpoint import Checkpoint, assign, renamed, vocabulary
from specinfer.drafts.published.dflash2 import DFlash2Network, DFlash2Session
from specinfer.drafts.published.dflash_network import FULL, SLIDING, DFlashNetwork, block_config
from specinfer.drafts.published.domino import DominoNetwork
from specinfer.drafts.published.dspark import DSparkNetwork, DSparkSession, RecurrentSession
from specinfer.drafts.published.network import OpenSession
from specinfer.errors import one_line

KINDS = ("dflash2", "domino", "dspark", "dflash")  # the more special first
TYPES: dict[str, type[PreTrainedConfig]] = {
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
}  # of layers that are Qwen3's, whoever names them
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("layer_types", "sliding_window", "rope_parameters"),
)
OLDER = ("rope_theta", "rope_scaling", "use_sliding_window", "max_window_layers")  # of configurations before 5.0
MARKOV_HEADS = ("vanilla", "gated", "rnn")

Options = Mapping[str, Any]


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a block head."""
    return "dflash_config" in checkpoint.config or any(kind in _labels(checkpoint) for kind in (*KINDS, "jetspec"))


def load(checkpoint: Checkpoint) -> tuple[DFlashNetwork, OpenSession]:
    """Load a block head: its network, and what opens a session.

    Raises:
        ModelError: something is missing, unknown, damaged, or cannot be honoured.
    """
    kind = next((kind for kind in KINDS if kind in _labels(checkpoint)), "dflash")
    options = _options(checkpoint)
    fields = _fields(checkpoint, options, kind)
    if kind in SPECIAL:
        fields |= SPECIAL[kind](checkpoint, options)
    if kind == "dspark" and not fields["markov_rank"] and not fields["enable_confidence_head"]:
        kind = "dflash"
    weights = renamed(checkpoint.weights(), _current_name)
    ids = vocabulary(checkpoint, weights, fields["vocab_size"])
    if kind == "dflash2" and ids is not None:
        raise checkpoint.refuse("it has d2t, and a DFlash 2 head's selector knows the whole vocabulary only")
    network_type, session = NETWORKS[kind]
    if fields.get("markov_head_type") == "rnn" and fields["markov_rank"]:
        session = RecurrentSession
    has = {what: f"{name}.weight" in weights for what, name in (("embeds", "embed_tokens"), ("outputs", "lm_head"))}
    with torch.device("meta"):
        network = network_type(block_config(**fields), ids, **has)
    assign(checkpoint, network, weights if ids is None else {**weights, "token_ids": ids})
    return network, session


def _labels(checkpoint: Checkpoint) -> str:
    """Return everything that names the head's architecture."""
    config = checkpoint.config
    special = config.get("dflash_config")
    named = special.get("projector_type") if isinstance(special, dict) else None
    return f"{config.get('architectures')} {config.get('speculators_model_type')} {named}".lower()


def _options(checkpoint: Checkpoint) -> Options:
    """Return the configuration, what ``dflash_config`` says first."""
    special = checkpoint.config.get("dflash_config", {})
    if not isinstance(special, dict):
        raise checkpoint.refuse("its dflash_config is not a JSON object")
    return {**checkpoint.config, **{name: value for name, value in special.items() if value is not None}}


def _fields(checkpoint: Checkpoint, options: Options, kind: str) -> dict[str, Any]:
    """Return what `block_config` needs of any head."""
    fields = _layers(checkpoint)
    by_state = "aux_hidden_state_layer_ids" in options
    mask, size = options.get("mask_token_id"), checkpoint.size("block_size", of=options)
    if type(mask) is not int or not 0 <= mask < fields["vocab_size"]:
        raise checkpoint.refuse(f"its mask_token_id is {mask!r:.40}, not a token below {fields['vocab_size']}")
    anchored = options.get("sample_from_anchor", options.get("shift_label"))
    by_default = kind == "dspark" and "dflash_config" not in checkpoint.config
    fields |= {
        "block_size": size,
        "mask_token_id": mask,
        "target_layer_ids": _layer_ids(checkpoint, options, fields["num_hidden_layers"]),
        "layer_offset": 0 if by_state else 1,
        "target_size": checkpoint.size("target_hidden_size", default=fields["hidden_size"], of=options),
        "from_anchor": by_default if anchored is None else bool(anchored),
        "measured_anchor": anchored is None and kind != "domino",
        "causal_types": _causal_types(options),
        "input_scale": float(options.get("input_embedding_scale") or 1),
        "output_scale": float(options.get("output_multiplier") or 1),
        "softcap": options.get("final_logit_softcapping"),
    }
    window = fields["sliding_window"]
    if SLIDING in fields["layer_types"] and SLIDING not in fields["causal_types"] and size > window:
        raise checkpoint.refuse(f"its blocks of {size} slots are longer than its window of {window} tokens")
    return fields


def _layers(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return sizes and types of layers, what is not said as transformers assumes it."""
    source = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    if not isinstance(source, dict):
        source = dict(source) if isinstance(source, Mapping) else {}
    if (model_type := source.get("model_type", "qwen3")) not in TYPES:
        raise checkpoint.refuse(f"its layers are of type {model_type!r:.40}, and only {', '.join(TYPES)} are known")
    if (checkpoint.folder / "mask_embedding.pt").exists():
        raise checkpoint.refuse("its mask token's embedding is in mask_embedding.pt, which is not supported")
    if "quantization_config" in checkpoint.config:
        raise checkpoint.refuse("it is quantised: take it in 16 bits")
    try:
        given = TYPES[model_type](**{name: source[name] for name in (*SIZES, *OLDER) if name in source})
        fields = {name: getattr(given, name, None) for name in SIZES}
        types = fields["layer_types"] = list(fields["layer_types"] or [FULL] * given.num_hidden_layers)
        rope = (fields["rope_parameters"] or {}).get("rope_type", "default")
    except Exception as error:  # of any kind: transformers checks little
        raise checkpoint.refuse(f"its configuration is damaged: {one_line(error)}") from error
    if unknown := set(types) - {FULL, SLIDING}:
        raise checkpoint.refuse(f"it has layers of type {min(unknown)!r:.40}, which are not known")
    if SLIDING in types and not fields["sliding_window"]:
        raise checkpoint.refuse("its layers have sliding windows, and it does not say how long they are")
    if rope in ("dynamic", "longrope"):
        raise checkpoint.refuse(f"its positions are of type {rope!r}, which change with the length of the text")
    return fields


def _layer_ids(checkpoint: Checkpoint, options: Options, layers: int) -> list[int]:
    """Return the ids of the target's layers that the head reads; -1 is the embedding."""
    ids = options.get("aux_hidden_state_layer_ids", options.get("target_layer_ids"))
    if ids is None:
        last = checkpoint.size("num_target_layers", of=options) - 4
        return [(last + 4) // 2] if layers == 1 else [round(1 + i * last / (layers - 1)) for i in range(layers)]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= -1 for i in ids):
        raise checkpoint.refuse(f"the target's layers that it reads are {ids!r:.40}, not a list of numbers")
    return ids


def _causal_types(options: Options) -> list[str]:
    """Return the types of layers whose slots see no later ones: sliding ones, unless the configuration says otherwise.

    ``is_causal`` and sliding layers are z-lab's and SpecForge's, ``sliding_window_non_causal`` is speculators'.
    """
    said = [options[name] for name in ("is_causal", "causal", "causal_head") if options.get(name) is not None]
    if said:
        return [FULL, SLIDING] if any(said) else []
    return [] if options.get("sliding_window_non_causal") else [SLIDING]


def _dflash2_fields(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    fields = {name: checkpoint.size(name, of=options) for name in names}
    if options["hidden_size"] % fields["conv_group_size"]:
        raise checkpoint.refuse(f"its conv_group_size {fields['conv_group_size']} does not divide its hidden_size")
    return fields


def _domino_fields(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    fields = {name: checkpoint.size(name, of=options) for name in ("emb_dim", "gru_hidden_dim")}
    return {**fields, "pure_draft_prefix_len": int(options.get("pure_draft_prefix_len") or 0)}


def _dspark_fields(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """Return what is said of the Markov and confidence heads; speculators leaves out what is usual."""
    usual = "speculators_model_type" in checkpoint.config
    rank = options.get("markov_rank", 256 if usual else 0)
    kind = str(options.get("markov_head_type", "vanilla")).lower()
    if type(rank) is not int or rank < 0 or kind not in MARKOV_HEADS:
        raise checkpoint.refuse(f"its Markov head is {kind!r:.40} of rank {rank!r:.40}, which is not known")
    confident = options.get("enable_confidence_head", usual or bool(options.get("confidence_head_alpha")))
    reads_parents = bool(confident and options.get("confidence_head_with_markov", usual))
    if reads_parents and not rank:
        raise checkpoint.refuse("its confidence head reads a Markov head, and there is none")
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": bool(confident),
        "confidence_head_with_markov": reads_parents,
    }


def _current_name(name: str) -> str:
    """Return what a weight is called today; some trainers put a module around the heads, or wrap the codebooks."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    return re.sub(r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1", name)


SPECIAL: dict[str, Callable[[Checkpoint, Options], dict[str, Any]]] = {
    "dflash2": _dflash2_fields,
    "domino": _domino_fields,
    "dspark": _dspark_fields,
}
NETWORKS: dict[str, tuple[type[DFlashNetwork], OpenSession]] = {
    "dflash2": (DFlash2Network, DFlash2Session),
    "domino": (DominoNetwork, PathSession),
    "dspark": (DSparkNetwork, DSparkSession),
    "dflash": (DFlashNetwork, BlockSession),
}
