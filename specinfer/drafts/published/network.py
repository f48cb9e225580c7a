"""What the networks of drafts that read a target's hidden states have in common: what they borrow from the target.

Knows: embedding, output matrix, vocabulary, rotary tables.  Does not know: layers, drafting, files.

A network has the forward signature of a ``transformers`` causal LM, so that it runs behind a tree mask.  It borrows the
target's embedding and output matrix where it has none of its own.
"""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specinfer.attention import TreeModel, device_of, weight_of
from specinfer.errors import ModelError, UnsupportedModel

Network = TypeVar("Network", bound=nn.Module)


class DraftNetwork(nn.Module):
    """A network that reads a target's hidden states.

    Attributes:
        skips_first: whether a text's first token, which no state chose, was left out when it was trained.

    Args:
        config: a ``transformers`` configuration; ``hidden_size`` is the network's own.
        token_ids: (V',) int64, the target's ids that the network may propose; None = all, in the target's order.
        embeds: whether it has an embedding of its own, ``embed_tokens``.
        outputs: whether it has an output matrix of its own, ``lm_head``.
    """

    skips_first = False

    def __init__(
        self, config: Any, token_ids: Tensor | None = None, embeds: bool = False, outputs: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", token_ids)
        words = config.vocab_size if token_ids is None else len(token_ids)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if embeds else None
        self.lm_head = nn.Linear(config.hidden_size, words, bias=False) if outputs else None
        self.embedding: Tensor | None  # (V, H), the target's or its own
        self.cosines: Tensor  # (positions, D)
        self.sines: Tensor
        for name in ("embedding", "cosines", "sines"):  # set by `bind`, and never saved
            self.register_buffer(name, None, persistent=False)
        self.output: nn.Linear | None = None  # borrowed rows of the target's output matrix, (V', H)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the weights."""
        return next(weight.dtype for weight in self.parameters() if weight.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def bind(self, target: Any) -> Self:
        """Borrow what is missing from a target; return self on the target's device.

        Raises:
            ModelError: the target's matrix is packed (quantised), or of another size.
        """
        device = device_of(target)
        self.to(device)
        words = self.embed_tokens
        self.embedding = words.weight.detach() if words else self._borrowed(target.get_input_embeddings(), "embedding")
        if self.lm_head is None:
            rows = self._borrowed(target.get_output_embeddings(), "output matrix")
            rows = (rows if self.token_ids is None else rows[self.token_ids]).to(self.dtype)
            if self.output is None:
                self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta").train(self.training)
            self.output.weight = nn.Parameter(rows, requires_grad=False)
        positions = torch.arange(self.config.max_position_embeddings, device=device)
        with torch.device("cpu"):  # whatever the caller's default is
            rotary = LlamaRotaryEmbedding(self.config)
        cosines, sines = rotary.to(device)(next(self.parameters()), positions[None])
        self.cosines, self.sines = cosines[0], sines[0]
        return self

    def bound(self, target: Any) -> Self:
        """Return a copy in a target's dtype that is bound to it; weights that fit as they are, are shared."""
        return moved_copy(self, target).bind(target)

    def get_input_embeddings(self) -> Any:
        """Return what holds the embedding, as transformers' models do."""
        return SimpleNamespace(weight=self.embedding)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings (..., H) in the network's dtype."""
        assert self.embedding is not None, "bind the network to a target first"
        return functional.embedding(ids, self.embedding).to(self.dtype)

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D) at positions."""
        return self.cosines[position_ids].to(dtype), self.sines[position_ids].to(dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the network's vocabulary of its final states (..., H)."""
        head = self.lm_head or self.output
        assert head is not None, "bind the network to a target first"
        return head(states.to(head.weight.dtype))

    def _borrowed(self, module: Any, what: str) -> Tensor:
        """Return a target's matrix as it is: fetched if it is offloaded, and put together if processes share it."""
        weight = weight_of(module)
        if not weight.is_floating_point() or weight.ndim != 2 or weight.shape[1] != self.config.hidden_size:
            raise ModelError(
                f"the target's {what} is {weight.dtype} of shape {tuple(weight.shape)}, and this draft borrows one of "
                f"width {self.config.hidden_size}: take a target that keeps it unquantised, or a draft that has its own"
            )
        return weight


def check_readable(name: str, target: TreeModel) -> None:
    """Raise `UnsupportedModel` unless a target hands out the hidden states that a draft reads."""
    if target.ranks.stages > 1:
        problem = f"draft {name} reads the target's hidden states, which no process has in pipeline stages"
        raise UnsupportedModel(f"{problem}: use tensor parallelism, or drafts such as suffix or a smaller model")


def moved_copy(network: Network, target: Any) -> Network:
    """Return a copy of a network where a target is and in its dtype; weights that fit as they are, are shared."""
    weights = (*network.parameters(), *network.buffers())
    return deepcopy(network, {id(weight): _moved(weight, target) for weight in weights})


def _moved(weight: Tensor, target: Any) -> Tensor:
    """Return a weight where a target is and in its dtype: itself, if it is there."""
    moved = weight.detach().to(device_of(target), target.dtype if weight.is_floating_point() else None)
    if moved.data_ptr() == weight.data_ptr():
        return weight
    return nn.Parameter(moved, requires_grad=False) if isinstance(weight, nn.Parameter) else moved
