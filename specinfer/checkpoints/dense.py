"""Making a packed model dense: for devices, dtypes and training that packed weights are not for.

Knows: which dense module a packed one stands for.  Does not know: files, the packed layout, formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specinfer.attention.packed.formats import numbers
from specinfer.attention.packed.layout import unpack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def make_dense(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model dense weights in the place of packed ones; all its weights are rounded to a dtype."""
    weights: dict[int, nn.Parameter] = {}  # by packed matrix, for some are tied
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedLinear | PackedEmbedding):
            continue
        if (key := module.packed.data_ptr()) not in weights:
            weights[key] = nn.Parameter(_numbers(module, dtype))
        with torch.device("meta"):
            new = _like(module)
        new.weight = weights[key]
        if isinstance(module, PackedLinear):
            new.register_parameter("bias", module.bias)
        model.set_submodule(path, new.train(module.training))
    nn.Module.to(model, dtype)
    model.config.dtype = dtype


def _like(module: PackedLinear | PackedEmbedding) -> nn.Linear | nn.Embedding:
    if isinstance(module, PackedEmbedding):
        return nn.Embedding(module.num_embeddings, module.embedding_dim)
    return nn.Linear(module.in_features, module.out_features, module.bias is not None)


def _numbers(module: PackedLinear | PackedEmbedding, dtype: torch.dtype) -> Tensor:
    """Return a module's weight, rounded to a dtype."""
    return torch.cat([numbers(part).to(dtype) for part in unpack(module.packed, module.inputs)])
