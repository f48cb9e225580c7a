"""Layers of a model whose weights are packed: they take the places of `nn.Linear`, `nn.Embedding` and of experts.

Knows: one packed matrix, its bias, to how many bits products round states; which experts states choose.
Does not know: the layout, files, models.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from specinfer.attention.packed.layout import is_narrow, narrow
from specinfer.attention.packed.products import wide_states
from specinfer.attention.torch_private import modules_of
from specinfer.errors import UnsupportedModel


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


class Joined(Protocol):
    """Experts as transformers has them: each of their weights is that of all experts."""

    down_proj: Tensor  # (E, H, I), or (E, I, H) if it is transposed
    is_transposed: bool
    is_concatenated: bool  # outputs of gates come before those of "up", and not by turns with them
    has_bias: bool

    def _apply_gate(self, both: Tensor) -> Tensor: ...


class Experts(nn.ModuleList):
    """The experts of a mixture, each with linear layers of its own, which may be packed.

    Args:
        joined: the module whose place it takes.
    """

    def __init__(self, joined: Joined) -> None:
        count, *sides = joined.down_proj.shape
        size, hidden = sides if joined.is_transposed else reversed(sides)
        sizes = {"gate_proj": (hidden, size), "up_proj": (hidden, size), "down_proj": (size, hidden)}
        super().__init__(
            nn.ModuleDict({name: nn.Linear(*shape, bias=joined.has_bias) for name, shape in sizes.items()})
            for _ in range(count)
        )
        self._activate, self._by_turns = joined._apply_gate, not joined.is_concatenated

    def forward(self, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return the sums (T, H) of what experts make of states (T, H), by their numbers and shares (T, experts).

        Raises:
            UnsupportedModel: a graph of it is asked for.
        """
        if torch.compiler.is_exporting():
            raise UnsupportedModel("states choose which packed experts are read, and a graph cannot")
        found = torch.zeros_like(states)
        for number in chosen.unique().tolist():
            rows, columns = torch.where(chosen == number)
            expert, read = self[number], states[rows]
            pair = expert["gate_proj"](read), expert["up_proj"](read)
            active = self._activate(torch.stack(pair, -1).flatten(-2) if self._by_turns else torch.cat(pair, -1))
            found.index_add_(0, rows, expert["down_proj"](active) * shares[rows, columns, None])
        return found


def are_experts(module: nn.Module) -> TypeGuard[Joined]:
    """Whether `Experts` can take the place of a module."""
    return getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)


def is_packed(model: nn.Module) -> bool:
    """Whether a model, or a head that borrows from it, reads packed matrices."""
    return any(map(holds_packed, model.buffers()))


def comparable(model: nn.Module) -> AbstractContextManager[None]:
    """Round states to 16 bits in this thread's products, if a model has packed matrices: no other needs the library."""
    return wide_states() if is_packed(model) else nullcontext()


def round_states(model: nn.Module) -> None:
    """Let all products of a model with packed matrices round states to integers of 8 bits, in place of 16."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            narrow(module.packed)


def rounds_states(model: nn.Module) -> bool:
    """Whether products with packed matrices of a model round states to 8 bits."""
    packed = next((module.packed for module in modules_of(model) if isinstance(module, PackedLinear)), None)
    return packed is not None and is_narrow(packed)


def holds_packed(buffer: Tensor) -> bool:
    """Whether a tensor of a model is a packed matrix."""
    return buffer.dtype == torch.uint8 and buffer.ndim == 1
