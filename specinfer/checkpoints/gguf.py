"""Loading a model from a GGUF file: its weights stay at the size that they have there.

Knows: which module each tensor is a weight of, in which order rows stand.
Does not know: formats of blocks, the packed layout, how models are found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specinfer.attention.packed.formats import DENSE, Quantised, dense, quantised
from specinfer.attention.packed.gguf import Gguf, Stored, open_gguf
from specinfer.attention.packed.layout import pack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.checkpoints.configuration import ROTARY, configuration, ends
from specinfer.checkpoints.keys import Keys
from specinfer.checkpoints.tokenizer import tokenizer_of
from specinfer.common.memory import LargePages, free_bytes
from specinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PART = 512  # rows that are taken apart at once: a multiple of 32
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
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
}


def load_gguf(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a GGUF file, or from its parts by the first.

    The model is transformers' own, in float32 and on the CPU.  Linear layers and embeddings that the file holds
    quantised are `PackedLinear` and `PackedEmbedding`, whose numbers are those of the file; everything else is dense.

    Raises:
        ModelError: it cannot be read or is damaged, has an architecture, a format, a tokenizer, a tensor or a key that
            is not known, or does not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    file = open_gguf(path)
    keys = Keys(file)
    config = configuration(keys, file.tensors)
    tokenizer = tokenizer_of(keys, config.max_position_embeddings)
    stops = ends(keys)
    keys.check_all_used()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if stops:
        model.generation_config.eos_token_id = stops
    _fill(model, {_name(name): stored for name, stored in file.tensors.items() if name != ROTARY}, file, keys)
    return model.eval(), tokenizer


def _name(tensor: str) -> str:
    """Return transformers' name of a tensor, or the given one if it has none."""
    parts = tensor.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_LAYERS:
        return f"model.layers.{parts[1]}.{_OF_LAYERS[parts[2]]}.{parts[3]}"
    return f"{_MODULES[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in _MODULES else tensor


def _fill(model: PreTrainedModel, tensors: dict[str, Stored], file: Gguf, keys: Keys) -> None:
    """Give a model without memory its weights, and its tables their numbers."""
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    if model.config.tie_word_embeddings:
        del wanted[f"{HEAD}.weight"]
    _check_shapes(wanted, {name: stored.shape for name, stored in tensors.items()}, keys)
    _check_memory(tensors, keys)
    pages = LargePages()
    # weights first: a module that takes the place of another one gets its bias then
    for name, stored in sorted(tensors.items(), key=lambda pair: not pair[0].endswith(".weight")):
        path, _, leaf = name.rpartition(".")
        order = _order(path, model.config)
        try:
            if stored.kind in DENSE:
                weight = dense(stored.kind, stored.rows).view(stored.shape)
                setattr(model.get_submodule(path), leaf, _parameter(weight if order is None else weight[order]))
            else:
                new = _packed_like(model.get_submodule(path))
                new.packed = pack(_parts(stored, order), *stored.shape, pages)
                model.set_submodule(path, new)
        except ModelError as error:
            raise keys.refusal(f"{name}: {error}") from error
        file.release()
    if model.config.tie_word_embeddings:
        _tie(model)
    for path, module in list(model.named_modules()):  # rotary frequencies: what a module computes of its configuration
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(path, type(module)(config=model.config))


def _check_shapes(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], keys: Keys) -> None:
    """Raise `ModelError` unless a file has the tensors that its model has."""
    if others := sorted(found.keys() - wanted.keys()):
        advice = "they may change the model: use another file"
        raise keys.refusal(f"{len(others)} of its tensors are not known ({', '.join(others[:3])})", advice)
    if missing := sorted(wanted.keys() - found.keys()):
        raise keys.refusal(f"it lacks {len(missing)} tensors ({', '.join(missing[:3])})")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise keys.refusal(f"{name} has shape {found[name]}, and its metadata says {shape}")


def _check_memory(tensors: dict[str, Stored], keys: Keys) -> None:
    """Raise `ModelError` if weights that are dense in float32, or packed at the file's size, do not fit into memory."""
    needed = sum(
        torch.Size(stored.shape).numel() * torch.float32.itemsize if stored.kind in DENSE else stored.rows.numel()
        for stored in tensors.values()
    )
    if needed > (free := free_bytes()):
        raise keys.refusal(
            f"its weights need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: end other programs, "
            "or take a file of fewer bits"
        )


def _order(path: str, config: PreTrainedConfig) -> Tensor | None:
    """Return the order of a tensor's rows, if a file has another one.

    Rotary pairs of a head's outputs are neighbours in files of llamas; in transformers one is half a head away.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(path.rpartition(".")[2])
    if heads is None or config.model_type != "llama":
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


def _parts(stored: Stored, order: Tensor | None) -> Iterator[Quantised]:
    """Yield a tensor's rows, so many at once that little memory is needed."""
    for begin in range(0, len(stored.rows), PART):
        part = slice(begin, begin + PART)
        yield quantised(stored.kind, stored.rows[part] if order is None else stored.rows[order[part]])


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _packed_like(module: nn.Module) -> PackedLinear | PackedEmbedding:
    """Return a module, still without weights, that takes the place of a dense one."""
    if type(module) is nn.Linear:
        return PackedLinear(module.in_features, module.out_features, module.bias is not None)
    if type(module) is nn.Embedding:
        return PackedEmbedding(module.num_embeddings, module.embedding_dim)
    raise ModelError("it is quantised, and should be dense: the file was converted by another program")


def _tie(model: PreTrainedModel) -> None:
    """Let the head have the weights of the embeddings."""
    embedding, head = model.get_submodule(EMBEDDING), model.get_submodule(HEAD)
    if isinstance(embedding, PackedEmbedding):
        new = _packed_like(head)
        new.packed = embedding.packed
        model.set_submodule(HEAD, new)
    else:
        head.weight = embedding.weight
