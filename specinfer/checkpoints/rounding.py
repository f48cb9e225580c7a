"""Rounding the weights of a model that was loaded, in place: its linear layers become packed ones of fewer bits.

Knows: which weights of a model are rounded.  Does not know: to which numbers, files, products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from specinfer.attention.packed.formats import numbers
from specinfer.attention.packed.layout import GROUP, code_of, kind_of, pack, unpack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear, is_packed
from specinfer.attention.packed.rounding import rounded
from specinfer.checkpoints.filling import packed_like
from specinfer.common.memory import LargePages
from specinfer.common.model_options import ROUNDED
from specinfer.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_OUTPUTS = 8  # bits that output embeddings keep
PART = 1024  # rows that are rounded at a time: a multiple of 32
WORTH = 0.5  # of the parameters must be in layers that are rounded


@torch.no_grad()
def round_weights(model: PreTrainedModel, form: str) -> None:
    """Round the weights of a model's linear layers; all else becomes float32.

    Packed matrices of as many bits or more are rounded a second time, others stay as they are.  Output embeddings keep
    8 bits, and so do input embeddings if they are the same.  Dense weights are released one by one.

    Args:
        model: on a CPU; it is changed.
        form: of `model_options.ROUNDED`.

    Raises:
        UnsupportedModel: most of its weights are not in linear layers with a multiple of 32 inputs, another library
            quantised it, or its code reads weights of linear layers by itself.
        ModelError: a weight has numbers that cannot be scaled.
    """
    name = type(model).__name__
    if not is_packed(model):
        _check_share(model, form)
    output, embedding, pages = model.get_output_embeddings(), model.get_input_embeddings(), LargePages()
    tied = _matrix(embedding) is _matrix(output)
    layers = [path for path, module in model.named_modules() if _is_dense(module) or isinstance(module, PackedLinear)]
    for path in layers:
        module = model.get_submodule(path)
        bits = OF_OUTPUTS if module is output else ROUNDED[form]
        try:
            new = _rounded(module, bits, pages)
        except ModelError as error:
            raise ModelError(f"{name} cannot be rounded to {form}: {path}: {error}") from error
        model.set_submodule(path, new)
        if module is output and tied and type(embedding) in (nn.Embedding, PackedEmbedding):
            shared = packed_like(embedding) if type(embedding) is nn.Embedding else embedding
            shared.packed = new.packed
            model.set_input_embeddings(shared.train(module.training))
    model.float()
    model.config.dtype = torch.float32
    try:
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except AttributeError as error:
        raise UnsupportedModel(f"{name} cannot be rounded: its code reads weights by itself ({error})") from error


def _matrix(module: nn.Module | None) -> object:
    """Return the matrix of a layer, packed or not."""
    return getattr(module, "packed", getattr(module, "weight", module))


def _is_dense(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a dense linear layer whose weight can be rounded."""
    return type(module) is nn.Linear and not module.in_features % GROUP


def _rounded(module: nn.Module, bits: int, pages: LargePages) -> PackedLinear:
    """Return a linear layer with its weight rounded; itself, if it is so already, or has fewer bits."""
    if _is_dense(module):
        new = PackedLinear(module.in_features, module.out_features, module.bias is not None)
        new.bias, parts = module.bias, iter(module.weight.split(PART))
    else:
        assert isinstance(module, PackedLinear), "others are not rounded"
        code, there = kind_of(module.packed)
        if there < bits or code == code_of(rounded(torch.zeros(1, GROUP), bits)):
            return module
        new, parts = module, (numbers(part) for part in unpack(module.packed, module.in_features, PART))
    new.packed = pack((rounded(part, bits) for part in parts), new.out_features, new.in_features, pages)
    return new.train(module.training)


def _check_share(model: PreTrainedModel, form: str) -> None:
    """Raise `UnsupportedModel` unless most weights of a model that is not packed can be rounded."""
    name = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(f"{name} cannot be rounded to {form}: another library quantised it")
    weights = {module.weight for module in model.modules() if _is_dense(module)}
    share = sum(weight.numel() for weight in weights) / sum(weight.numel() for weight in model.parameters())
    if share < WORTH:
        what = f"only {share:.0%} of its weights are in linear layers with a multiple of {GROUP} inputs"
        raise UnsupportedModel(f"{name} cannot be rounded to {form}: {what}")
