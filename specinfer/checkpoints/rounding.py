"""Rounding the weights of a model that was loaded, in place: its linear layers become packed ones of fewer bits.

Knows: which weights of a model are rounded, and to which numbers.  Does not know: files, products.

Linear layers are rounded to integers with a float16 scale for 32 inputs each:

    8 bits    integers from -128 to 127; the number of largest magnitude becomes 127 or -127
    4 bits    integers from -8 to 7; the number of largest magnitude becomes -8, or a little less than it is if the
              squared error of its group is smaller so
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from specinfer.attention.packed.formats import Quantised, numbers
from specinfer.attention.packed.layout import GROUP, code_of, kind_of, pack, unpack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear, is_packed
from specinfer.checkpoints.filling import packed_like
from specinfer.common.memory import LargePages
from specinfer.common.model_options import ROUNDED
from specinfer.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_OUTPUTS = 8  # bits that output embeddings keep
PART = 1024  # rows that are rounded at a time: a multiple of 32
WORTH = 0.5  # of the parameters must be in layers that are rounded
TRIED = {8: (-128 / 127,), 4: (1.0, 0.92)}  # by bits: scales, by the one that makes the largest the lowest


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


def rounded(weight: Tensor, bits: int) -> Quantised:
    """Return a weight (N, K), K a multiple of 32, rounded to integers of 8 or 4 bits.

    Raises:
        ModelError: a number is none, or is too large for a scale of 16 bits.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    lowest = 1 << (bits - 1)
    exact = torch.where(-low > high, low, high) / -lowest
    least, scales = torch.full_like(exact, torch.inf), torch.zeros_like(exact)
    for factor in TRIED[bits]:
        scale = (exact * factor).half().float()
        error = torch.addcmul(groups, _integers(groups, scale, lowest), scale, value=-1).norm(dim=-1, keepdim=True)
        scales = torch.where(error < least, scale, scales)
        least = torch.minimum(error, least)
    if not (least.isfinite().all() and scales.isfinite().all()):
        raise ModelError("it has numbers that no 16 bits can scale, or that are not numbers")
    integers = (_integers(groups, scales, lowest) + lowest).to(torch.uint8).flatten(1)
    return Quantised(integers, bits, lowest, None, GROUP, scales.squeeze(-1).half())


def _integers(groups: Tensor, scale: Tensor, lowest: int) -> Tensor:
    """Return the integers nearest to the numbers of groups divided by their scales; 0 where a scale is 0."""
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (groups * inverse).round_().clamp_(-lowest, lowest - 1)
