"""Giving a model without memory its weights: what checkpoints of all formats have in common.

Knows: which weights a model has, which modules take the places of dense ones.
Does not know: files, formats, the packed layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specinfer.attention.packed.modules import Experts, PackedEmbedding, PackedLinear, are_experts
from specinfer.common.memory import free_bytes
from specinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
Refusal = Callable[..., ModelError]  # of what is wrong, and of what to do


def wanted_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a model has, without a head that is its embeddings."""
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    if model.config.tie_word_embeddings:
        del wanted[f"{HEAD}.weight"]
    return wanted


def can_finish(model: PreTrainedModel) -> bool:
    """Whether a model's head, embeddings and tables are those that `finish` knows, and its matrices stand alone."""
    modules = dict(model.named_modules())
    tables = {type(module) for module in modules.values() if any(True for _ in module.buffers(recurse=False))}
    alone = all(weight.dim() <= 2 for weight in model.parameters())  # or else its experts were not split
    of_config = all("config" in inspect.signature(kind).parameters for kind in tables)
    return {HEAD, EMBEDDING} <= modules.keys() and alone and of_config


def split_experts(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give experts linear layers of their own where tensors of these names are those of single experts."""
    layers = {name.rpartition(".")[0] for name in names}
    for path, module in list(model.named_modules()):
        if are_experts(module) and f"{path}.0.gate_proj" in layers:
            with torch.device("meta"):
                model.set_submodule(path, Experts(module))


def check_shapes(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], refusal: Refusal) -> None:
    """Raise `ModelError` unless a file has the tensors that its model has."""
    if others := sorted(found.keys() - wanted.keys()):
        advice = "they may change the model: use another file"
        raise refusal(f"{len(others)} of its tensors are not known ({', '.join(others[:3])})", advice)
    if missing := sorted(wanted.keys() - found.keys()):
        raise refusal(f"it lacks {len(missing)} tensors ({', '.join(missing[:3])})")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise refusal(f"{name} has shape {found[name]}, and should have {shape}")


def check_memory(needed: int, refusal: Refusal) -> None:
    """Raise `ModelError` if weights do not fit into memory, by the bytes that they need."""
    if needed > (free := free_bytes()):
        raise refusal(
            f"its weights need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: end other programs, "
            "or take a file of fewer bits"
        )


def set_weight(model: PreTrainedModel, name: str, weight: Tensor) -> None:
    """Give a model one of its weights, by name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))


def packed_like(module: nn.Module) -> PackedLinear | PackedEmbedding:
    """Return a module, still without weights, that takes the place of a dense one.

    Raises:
        ModelError: it is neither a linear layer nor embeddings.
    """
    if type(module) is nn.Linear:
        return PackedLinear(module.in_features, module.out_features, module.bias is not None)
    if type(module) is nn.Embedding:
        return PackedEmbedding(module.num_embeddings, module.embedding_dim)
    raise ModelError("it is quantised, and should be dense: the file was converted by another program")


def finish(model: PreTrainedModel) -> None:
    """Give a model whose weights are there what no file holds: a tied head, and tables of rotary frequencies."""
    head = model.get_submodule(HEAD)
    if any(held.is_meta for held in (*head.parameters(), *head.buffers())):
        _tie(model, head)
    for path, module in list(model.named_modules()):  # what a module computes of its configuration
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(path, type(module)(config=model.config))


def _tie(model: PreTrainedModel, head: nn.Module) -> None:
    """Let the head have the weights of the embeddings."""
    embedding = model.get_submodule(EMBEDDING)
    if isinstance(embedding, PackedEmbedding):
        new = packed_like(head)
        new.packed = embedding.packed
        model.set_submodule(HEAD, new)
    else:
        head.weight = embedding.weight
