"""Layers of a model whose weights are packed: they take the places of `nn.Linear` and `nn.Embedding`.

Knows: one packed matrix, and its bias.  Does not know: the layout, files, models.
"""

import torch
from torch import Tensor, nn

import specinfer.attention.packed.products  # noqa: F401  (defines the operators)


class _Packed(nn.Module):
    """A module with a packed matrix (N, K), set after it is made: ``packed``, uint8, one dimension.

    Args:
        inputs: K.
    """

    packed: Tensor

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8))


class PackedLinear(_Packed):
    """A linear layer: products and sums are made in float32, and come in the dtype of the states.

    Args:
        in_features, out_features: K and N.
        bias: whether it has one, float32.
        order: the inputs as the matrix has them, (K) int64, where they are not in their own order.
    """

    order: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, order: Tensor | None = None) -> None:
        super().__init__(in_features)
        self.register_buffer("order", order)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., N) for states (..., K)."""
        ordered = states if self.order is None else states.index_select(-1, self.order)
        found = torch.ops.specinfer.packed_linear(ordered, [self.packed], [self.out_features])
        return (found if self.bias is None else found + self.bias).to(states.dtype)


class PackedEmbedding(_Packed):
    """Embeddings, float32.

    Args:
        num_embeddings, embedding_dim: N and K.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(embedding_dim)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Return (..., K) for token ids (...)."""
        return torch.ops.specinfer.packed_rows(ids, self.packed, self.embedding_dim)


def is_packed(model: nn.Module) -> bool:
    """Whether a model, or a head that borrows from it, reads packed matrices."""
    return any(buffer.dtype == torch.uint8 and buffer.ndim == 1 for buffer in model.buffers())
