"""EAGLE-3 heads: their network, and how checkpoints of EAGLE, SpecForge, SGLang and vLLM's speculators name it.

Knows: tensor names, the layers' formulas, what a configuration leaves open.
Does not know: drafting, caches, which convention a checkpoint was made with (`conventions` measures it).

EAGLE-3 (arXiv 2503.01840, section 3.1) fuses states of several layers of the target into one, g.  The first layer reads
the token's embedding beside it.  Below the root g is the head's own last state.  EAGLE-3.1 norms the target's states
one by one, and hands on its last state after the norm.
"""

from collections.abc import Mapping
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, Qwen3Config

from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.checkpoint import Checkpoint, assign, renamed, vocabulary
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.layers import DecoderLayer, Layer, Reading, network_config, norm
from specinfer.drafts.published.network import AutoregressiveNetwork, Mask, OpenSession
from specinfer.errors import ModelError, one_line

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")  # in every configuration
FIELDS = ("rms_norm_eps", "hidden_act", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters")  # may say
ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "llama3"}  # whose tables do not change with the length of a text
ATTENTION = "layers.0.self_attn."  # of a head's first layer: where its weights are
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Network = TypeVar("Network", bound=AutoregressiveNetwork)


class FirstLayer(Layer):
    """A decoder layer that reads embeddings beside states, and norms them apart."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = norm(config)

    def forward(self, states: Tensor, reading: Reading, embedded: Tensor, normed_residual: bool) -> Tensor:
        """Return states (B, T, H) after the layer.

        Args:
            states: (B, T, H).
            reading: `Attention`'s.
            embedded: (B, T, H) embeddings.
            normed_residual: whether it adds to the normed states.
        """
        normed = self.hidden_norm(states)
        read = torch.cat((self.input_layernorm(embedded), normed), -1)
        return self.added(normed if normed_residual else states, self.self_attn(read, read, reading))


class Eagle3Network(AutoregressiveNetwork):
    """An EAGLE-3 head.

    Attributes:
        norm_before_residual, norm_output: the convention that it runs under.

    Args:
        config: of `network_config`, with `Attention`'s fields and

            target_hidden_size    width of the target's states
            num_aux_layers        K, how many of them are fused
            fc, fc_bias           whether there is a matrix that fuses them, and whether it has a bias
            fc_norm               whether they are normed one by one (EAGLE-3.1) ...
            norm_before_fc        ... or together
            norm_before_residual  whether the first residual is the normed state; None: not known
            norm_output           whether the state handed on is the normed one; None: not known
            layer_ids             of the K states; None: EAGLE's three
            layer_shift           what the format adds to them to count as transformers does

        token_ids, embeds, outputs: as `DraftNetwork`.
    """

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        self.num_states, self.target_size = config.num_aux_layers, config.target_hidden_size
        self.norm_before_residual, self.norm_output = bool(config.norm_before_residual), bool(config.norm_output)
        states, width = self.num_states, self.num_states * self.target_size
        self.fc_norm = nn.ModuleList(norm(config, self.target_size) for _ in range(states)) if config.fc_norm else None
        self.input_norm = norm(config, width) if config.norm_before_fc else None
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias) if config.fc else None
        others = (DecoderLayer(config, index) for index in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *others])
        self.norm = norm(config)

    def conventions(self, layers: int) -> list[Convention]:
        """Return the readings that a target of this depth allows, first the one that the format prescribes.

        Raises:
            ModelError: it reads the last layer before the final norm, which transformers does not hand out.
        """
        ids, shift = self.config.layer_ids, self.config.layer_shift
        if ids is None:
            readings = [(layers,) if self.config.num_aux_layers == 1 else (2, layers // 2, layers - 3)]
        else:
            readings = [tuple(layer + more for layer in ids) for more in (shift, 1 - shift)]
            readings = [reading for reading in readings if max(reading) < layers]
        if not readings:
            raise ModelError(
                f"this draft reads the states of layers {', '.join(map(str, ids))} of a target with {layers}, the last "
                "before the final norm or beyond, and no state from there is handed out: choose another head"
            )
        options = []
        for name in ("norm_before_residual", "norm_output"):
            known = getattr(self.config, name)
            options.append([(name, value) for value in ((False, True) if known is None else (known,))])
        return [Convention(reading, chosen) for reading in readings for chosen in product(*options)]

    def fused(self, states: Tensor) -> Tensor:
        """Return the target's states (B, T, K, Ht) as one, (B, T, H)."""
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.unbind(2), strict=True)
            states = torch.stack([normed(part) for normed, part in parts], 2)
        flat = states.flatten(2)
        flat = flat if self.input_norm is None else self.input_norm(flat)
        return flat if self.fc is None else self.fc(flat)

    def next_states(self, states: Tensor, tokens: Tensor, mask: Mask, positions: Tensor, cache: Cache | None) -> Tensor:
        """Return the states that are handed on, (B, T, H)."""
        assert not isinstance(mask, Mapping)
        reading = Reading(mask, self.rotary(positions, self.dtype), cache)
        first, *others = self.layers
        states = first(states, reading, tokens, self.norm_before_residual)
        for layer in others:
            states = layer(states, reading)
        return self.norm(states) if self.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the network's vocabulary of states that it hands on (..., H)."""
        return super().logits(states if self.norm_output else self.norm(states))


# ---- checkpoints ----


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is an EAGLE-3 head's."""
    if (named := checkpoint.named("eagle3")) is not None:
        return named
    return any(_plain_name(name).startswith("layers.0.hidden_norm.") for name in checkpoint.weights)


def load(checkpoint: Checkpoint) -> tuple[Eagle3Network, OpenSession]:
    """Return a checkpoint's network and the function that opens its session.

    Raises:
        ModelError: something is missing, unknown or contradictory.
    """
    weights = read_weights(checkpoint)
    return load_network(checkpoint, weights, read_config(checkpoint, weights), Eagle3Network), HeadDraftSession


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights under the network's names."""
    return renamed(checkpoint.weights, _plain_name)


def load_network(
    checkpoint: Checkpoint, weights: dict[str, Tensor], config: LlamaConfig, kind: type[Network]
) -> Network:
    """Return the network of a kind that a checkpoint holds."""
    token_ids = vocabulary(checkpoint, weights, config.vocab_size)
    found = config.vocab_size if token_ids is None else len(token_ids)
    if (words := checkpoint.size("draft_vocab_size", default=found)) != found:
        raise checkpoint.refuse(f"its draft_vocab_size is {words}, but its d2t does not name as many tokens")
    apart = config.hidden_size != config.target_hidden_size  # then the target's matrices do not fit
    embeds = apart or "embed_tokens.weight" in weights
    outputs = apart or token_ids is not None or "lm_head.weight" in weights
    with torch.device("meta"):
        network = kind(config, token_ids, embeds, outputs)
    assign(checkpoint, network, weights)
    return network


def read_config(checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> LlamaConfig:
    """Return the configuration of a checkpoint's network, given its weights under the network's names."""
    top, layers = checkpoint.config, layers_of(checkpoint)
    ids, shift = _layer_ids(checkpoint)
    fused = (top.get("eagle_config") or {}).get("use_aux_hidden_state") is not False  # else the last state alone
    normed = bool(top.get("fc_norm")) or "fc_norm.0.weight" in weights
    handed_on = _flag(checkpoint, "norm_output")
    fields = {
        "target_hidden_size": checkpoint.size("target_hidden_size", default=layers.size("hidden_size")),
        "num_aux_layers": (len(ids) if ids else 3) if fused else 1,
        "fc": fused or "fc.weight" in weights,
        "fc_bias": "fc.bias" in weights,
        "fc_norm": normed,
        "norm_before_fc": bool(top.get("norm_before_fc")) or "input_norm.weight" in weights,
        "norm_before_residual": _flag(checkpoint, "norm_before_residual"),
        # without that norm, true says elsewhere that there is one before the output matrix
        "norm_output": handed_on if normed or not handed_on else None,
        "layer_ids": ids if fused else None,
        "layer_shift": shift,
    }
    return network_config(**layer_fields(layers, weights), **fields)


def layer_fields(layers: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the fields of layers that their configuration (`layers_of`) and their weights tell.

    Raises:
        ModelError: a size is missing, or the layers are of a kind that is not known.
    """
    given, sizes = layers.config, {name: layers.size(name) for name in (*SIZES, "vocab_size")}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise layers.refuse(f"its rotary embeddings are of type {kind!r:.40}, not {', '.join(sorted(ROPE_TYPES))}")
    if set(given.get("layer_types") or ()) - {"full_attention"}:
        raise layers.refuse("some of its layers do not attend to all tokens")
    return {
        **sizes,
        "num_key_value_heads": layers.size("num_key_value_heads", default=heads),
        "head_dim": layers.size("head_dim", default=hidden // heads or 1),
        "num_hidden_layers": layers.size("num_hidden_layers", default=1),
        "max_position_embeddings": layers.size("max_position_embeddings", default=2048),
        **{name: given[name] for name in FIELDS if given.get(name) is not None},
        "attention_bias": f"{ATTENTION}q_proj.bias" in weights or given.get("qkv_bias") is True,
        "qkv_bias": f"{ATTENTION}o_proj.bias" not in weights,
        "qk_norm": f"{ATTENTION}q_norm.weight" in weights,
    }


def layers_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the part whose configuration is the layers'; a nested one leaves out what is its kind's default."""
    nested = checkpoint.config.get("transformer_layer_config")
    if nested is None:
        return checkpoint
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    if not isinstance(nested, dict) or nested.get("model_type", "llama") not in kinds:
        raise checkpoint.refuse(f"its layers are not those of {' or '.join(kinds)}")
    try:
        return checkpoint.part(kinds[nested.get("model_type", "llama")](**nested).to_dict())
    except Exception as error:  # a value of a wrong type may raise anything
        raise checkpoint.refuse(f"its transformer_layer_config is damaged ({one_line(error, 100)})") from error


def _layer_ids(checkpoint: Checkpoint) -> tuple[list[int] | None, int]:
    """Return the ids of the layers that are read, and what their format adds to count as transformers does."""
    config = checkpoint.config
    inner = config.get("eagle_config") or {}
    target_ids = config.get("target_layer_ids", (config.get("dflash_config") or {}).get("target_layer_ids"))
    ids = config.get(LAYER_IDS) or inner.get(LAYER_IDS) or target_ids
    if not ids:
        return None, 0
    if not isinstance(ids, list) or not all(type(layer) is int and layer >= 0 for layer in ids):
        raise checkpoint.refuse(f"the layers that it reads are {ids!r:.60}, not a list of their numbers")
    if config.get(LAYER_IDS):  # vLLM's
        return ids, 0
    return ids, int(ids[0] == 1) if inner.get(LAYER_IDS) else 1  # SGLang's; DeepSpec's


def _flag(checkpoint: Checkpoint, name: str) -> bool | None:
    """Return a configuration's value of a convention; None if it has none."""
    value = checkpoint.config.get(name)
    if value is not None and not isinstance(value, bool):
        raise checkpoint.refuse(f"its {name} is {value!r:.40}, not true or false")
    return value


def _plain_name(name: str) -> str:
    """Return a weight's name without the prefixes of some writers, the first layer's as that of the others."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    if name.startswith("additional_layers."):
        index, _, rest = name.removeprefix("additional_layers.").partition(".")
        return f"layers.{int(index) + 1}.{rest}" if index.isdigit() else name
    return name
