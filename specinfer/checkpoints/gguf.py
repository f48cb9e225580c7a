"""Loading a model from a GGUF file: its weights stay at the size that they have there.

Knows: which module each tensor is a weight of, in which order rows stand.
Does not know: formats of blocks, the packed layout, how models are found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specinfer.attention.packed.formats import DENSE, Quantised, dense, numbers, quantised
from specinfer.attention.packed.gguf import Stored, open_gguf
from specinfer.checkpoints.configuration import ROTARY, configuration, ends
from specinfer.checkpoints.filling import EMBEDDING, HEAD, Filling, packed_like
from specinfer.checkpoints.keys import Keys
from specinfer.checkpoints.tokenizer import tokenizer_of
from specinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PART = 512  # rows that are taken apart at once: a multiple of 32
_MODULES = {"token_embd": EMBEDDING, "output_norm": "model.norm", "output": HEAD}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def load_gguf(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a GGUF file, or from its parts by the first.

    The model is transformers' own, in float32 and on the CPU.  Linear layers and embeddings that the file holds
    quantised are `PackedLinear` and `PackedEmbedding`, whose numbers are those of the file; everything else is dense.

    Args:
        path: of the file.
        dtype: that all numbers are rounded to, so that no matrix is packed.

    Raises:
        ModelError: it cannot be read or is damaged, has an architecture, a format, a tokenizer, a tensor or a key that
            is not known, or does not fit into memory.
    """
    file = open_gguf(path)
    keys = Keys(file)
    config = configuration(keys, file.tensors)
    tokenizer = tokenizer_of(keys, config.max_position_embeddings)
    stops = ends(keys)
    keys.check_all_used()
    tensors = dict(pair for name, stored in file.tensors.items() if name != ROTARY for pair in _named(name, stored))
    filling = Filling(config, tensors, keys.refusal)
    if stops:
        filling.model.generation_config.eos_token_id = stops
    if dtype is not None:
        filling.compute_in(dtype)
    filling.check_shapes(filling.wanted(), {name: stored.shape for name, stored in tensors.items()})
    filling.check_memory(sum(_bytes(stored, dtype) for stored in tensors.values()))
    # weights first: a module that takes the place of another one gets its bias then
    for name, stored in sorted(tensors.items(), key=lambda pair: not pair[0].endswith(".weight")):
        try:
            _fill(filling, name, stored, packs=dtype is None)
        except ModelError as error:
            raise keys.refusal(f"{name}: {error}") from error
        file.release()
    return filling.finish(), tokenizer


def _named(tensor: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield a tensor by its name of `_name`, or those of single experts that it holds."""
    if "{}" not in (name := _name(tensor)) or len(stored.shape) < 2:
        yield name, stored
        return
    experts, *shape = stored.shape
    for expert, rows in enumerate(stored.rows.view(experts, -1, stored.rows.shape[1])):
        yield name.replace("{}", str(expert)), Stored(stored.kind, tuple(shape), rows)


def _name(tensor: str) -> str:
    """Return transformers' name of a tensor, or the given one if it has none."""
    parts = tensor.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_LAYERS:
        return f"model.layers.{parts[1]}.{_OF_LAYERS[parts[2]]}.{parts[3]}"
    return f"{_MODULES[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in _MODULES else tensor


def _fill(filling: Filling, name: str, stored: Stored, packs: bool) -> None:
    """Give a model one of its weights: dense, or packed."""
    path = name.rpartition(".")[0]
    order = _order(path, filling.model.config)
    if stored.kind in DENSE:
        weight = dense(stored.kind, stored.rows).view(stored.shape)
        filling.set(name, weight if order is None else weight[order])
    elif not packs:
        parts = (numbers(part).to(filling.model.dtype) for part in _parts(stored, order))
        filling.set(name, torch.cat([*parts]))
    else:
        new = packed_like(filling.model.get_submodule(path))
        filling.set_packed(path, new, _parts(stored, order), stored.shape)


def _bytes(stored: Stored, dtype: torch.dtype | None) -> int:
    """Return the memory that a tensor takes: in a dtype, or else in float32 if it is dense, packed as in the file."""
    if stored.kind in DENSE or dtype is not None:
        return torch.Size(stored.shape).numel() * (dtype or torch.float32).itemsize
    return stored.rows.numel()


def _order(path: str, config: PreTrainedConfig) -> Tensor | None:
    """Return the order of a tensor's rows, if a file has another one.

    Rotary pairs of a head's outputs are neighbours in files of llamas; in transformers one is half a head away.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(path.rpartition(".")[2])
    if heads is None or config.model_type != "llama":
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


def _parts(stored: Stored, order: Tensor | None) -> Iterator[Quantised]:
    """Yield a tensor's rows, a few at once, so that little memory is needed."""
    for begin in range(0, len(stored.rows), PART):
        part = slice(begin, begin + PART)
        yield quantised(stored.kind, stored.rows[part] if order is None else stored.rows[order[part]])
