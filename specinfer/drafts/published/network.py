"""The common part of the networks of drafts that read a target's hidden states: the matrices that they borrow from it.

Knows: embedding, output matrix, vocabulary, rotary tables.  Does not know: layers, drafting, files.

A network has the forward signature of a ``transformers`` causal LM, so that it runs behind a tree mask.  It borrows the
target's embedding and output matrix where it has none of its own.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specinfer.attention import TreeModel, device_of, embedded, weight_of
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.engine.draft import Draft, DraftSession
from specinfer.errors import ModelError, UnsupportedModel, one_line

Mask = Tensor | Mapping[str, Tensor] | None  # of a pass, or one for each type of layer
OpenSession = Callable[..., DraftSession]  # of a session: takes model, auxiliary layers, context
Network = TypeVar("Network", bound=nn.Module)


class DraftNetwork(nn.Module):
    """A network that reads a target's hidden states.

    Subclasses give `build`.

    Attributes:
        vocab_size: V, the target's, as far as the configuration names it.
        words: V', how many tokens it may propose.
        skips_first: whether a text's first token, which no state chose, was left out when it was trained.

    Args:
        config: a ``transformers`` configuration; ``hidden_size`` is the network's own.
        token_ids: (V',) int64, the target's ids that the network may propose; None = all, in the target's order.
        embeds: whether it has an embedding of its own, ``embed_tokens``.
        outputs: whether it has an output matrix of its own, ``lm_head``.
    """

    skips_first = False

    def __init__(
        self, config: LlamaConfig, token_ids: Tensor | None = None, embeds: bool = False, outputs: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", token_ids)
        self.vocab_size: int = config.vocab_size
        self.words = self.vocab_size if token_ids is None else len(token_ids)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if embeds else None
        self.lm_head = nn.Linear(config.hidden_size, self.words, bias=False) if outputs else None
        self.embedding: Tensor | None  # (V, H), the target's or its own; or packed
        self.cosines: Tensor  # (positions, D)
        self.sines: Tensor
        for name in ("embedding", "cosines", "sines"):  # set by `bind`, and never saved
            self.register_buffer(name, None, persistent=False)
        self.output: nn.Linear | PackedLinear | None = None  # borrowed rows of the target's output matrix, (V', H)
        self.build(config)

    def build(self, config: LlamaConfig) -> None:
        """Add the layers; everything else is there."""

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the weights."""
        return next(weight.dtype for weight in self.parameters() if weight.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def bind(self, target: PreTrainedModel) -> Self:
        """Borrow missing matrices from a target; return self on the target's device.

        Raises:
            ModelError: the target's matrix is packed (quantised), or of another size; or rotary embeddings are damaged.
        """
        device = device_of(target)
        self.to(device)
        words = self.embed_tokens
        self.embedding = words.weight.detach() if words else self._borrowed(target.get_input_embeddings(), "embedding")
        if self.lm_head is None:
            self._borrow_output(target.get_output_embeddings())
        try:
            positions = torch.arange(self.config.max_position_embeddings, device=device)
            with torch.device("cpu"):  # whatever the caller's default is
                rotary = LlamaRotaryEmbedding(self.config)
            cosines, sines = rotary.to(device)(next(self.parameters()), positions[None])
        except Exception as error:  # a value of a wrong type may raise anything
            raise ModelError(f"the draft's rotary embeddings cannot be computed: {one_line(error)}") from error
        self.cosines, self.sines = cosines[0], sines[0]
        return self

    def _borrow_output(self, module: nn.Module) -> None:
        """Take the rows of a target's output matrix that the network proposes; all of a packed one stay packed."""
        rows = self._borrowed(module, "output matrix")
        if isinstance(module, PackedLinear):
            if self.token_ids is None:
                self.output = module
                return
            rows = embedded(module, self.token_ids)
        elif self.token_ids is not None:
            rows = rows[self.token_ids]
        if not isinstance(self.output, nn.Linear):
            self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta").train(self.training)
        self.output.weight = nn.Parameter(rows.to(self.dtype), requires_grad=False)

    def bound(self, target: PreTrainedModel) -> Self:
        """Return a copy in a target's dtype that is bound to it; weights that fit as they are, are shared."""
        return moved_copy(self, target).bind(target)

    def get_input_embeddings(self) -> object:
        """Return a holder of the embedding, as transformers' models do."""
        return SimpleNamespace(weight=self.embedding)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings (..., H) in the network's dtype."""
        assert self.embedding is not None, "bind the network to a target first"
        if self.embedding.dtype == torch.uint8:  # packed
            return torch.ops.specinfer.packed_rows(ids, self.embedding, self.config.hidden_size).to(self.dtype)
        return functional.embedding(ids, self.embedding).to(self.dtype)

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D) at positions."""
        return self.cosines[position_ids].to(dtype), self.sines[position_ids].to(dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the network's vocabulary of its final states (..., H)."""
        head = self.lm_head or self.output
        assert head is not None, "bind the network to a target first"
        return head(states.to(self.dtype))

    def _borrowed(self, module: nn.Module, what: str) -> Tensor:
        """Return a target's matrix as it is: fetched if it is offloaded, and put together if processes share it."""
        if isinstance(module, PackedEmbedding | PackedLinear) and module.inputs == self.config.hidden_size:
            return module.packed
        weight = weight_of(module)
        if not weight.is_floating_point() or weight.ndim != 2 or weight.shape[1] != self.config.hidden_size:
            raise ModelError(
                f"the target's {what} is {weight.dtype} of shape {tuple(weight.shape)}, and this draft borrows one of "
                f"width {self.config.hidden_size}: take a target that keeps it unquantised, or a draft that has its own"
            )
        return weight


class AutoregressiveNetwork(DraftNetwork):
    """A head that drafts level by level, from the target's states or, below the root, from its own.

    Attributes:
        num_states: K, how many of the target's hidden states it reads at a token.
        target_size: Ht, their width.
    """

    skips_first = True
    num_states: int
    target_size: int

    @property
    def pass_inputs(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """The additional inputs of each kind of pass: name -> shape after (B, T)."""
        return {"target_states": (self.num_states, self.target_size)}, {"draft_states": (self.config.hidden_size,)}

    def fused(self, states: Tensor) -> Tensor:
        """Return the target's states (B, T, K, Ht) as one, (B, T, H): by default the only one."""
        return states[:, :, 0]

    @abstractmethod
    def next_states(self, states: Tensor, tokens: Tensor, mask: Mask, positions: Tensor, cache: Cache | None) -> Tensor:
        """Return the head's own states, which it hands on, of those that chose the tokens; all (B, T, H).

        Args:
            states: that chose the tokens.
            tokens: embeddings of the tokens.
            mask: (B, 1, T, L), as the attention implementation takes it, or a dict of them by layer type.
            positions: (B, T).
            cache: keys and values of earlier tokens, on transformers' interface.
        """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Mask = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        target_states: Tensor | None = None,
        draft_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: object,
    ) -> SimpleNamespace:
        """Return ``logits`` (B, T or kept, V') of what follows each token, and ``hidden_states``, one (B, T, H).

        Args:
            input_ids: (B, T) ids of the target.
            attention_mask, position_ids, cache: mask, positions and cache of `next_states`.
            target_states: (B, T, K, Ht) the target's states that chose the tokens; or else
            draft_states: (B, T, H) the head's own states that did.
            logits_to_keep: columns whose logits are wanted; 0 = all.
        """
        assert position_ids is not None
        if draft_states is None:
            assert target_states is not None
            draft_states = self.fused(target_states.to(self.dtype))
        given = attention_mask, position_ids, cache
        hidden = self.next_states(draft_states.to(self.dtype), self.embed(input_ids), *given)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.logits(kept), hidden_states=(hidden,))


def check_readable(name: str, target: TreeModel) -> None:
    """Raise `UnsupportedModel` unless a target hands out the hidden states that a draft reads."""
    if target.ranks.stages > 1:
        problem = f"draft {name} reads the target's hidden states, which no process has in pipeline stages"
        raise UnsupportedModel(f"{problem}: use tensor parallelism, or other drafts: suffix, a smaller model")


def attached_model(draft: Draft) -> Any:
    """Return what an attached draft runs; raise `ModelError` for one that has no target yet."""
    if draft.model is None:
        raise ModelError(f"draft {draft.name} reads a target's states: attach it to one, or give it to a decoder")
    return draft.model


def moved_copy(network: Network, target: PreTrainedModel) -> Network:
    """Return a copy of a network where a target is and in its dtype; weights that fit as they are, are shared."""
    weights = (*network.parameters(), *network.buffers())
    return deepcopy(network, {id(weight): _moved(weight, target) for weight in weights})


def _moved(weight: Tensor, target: PreTrainedModel) -> Tensor:
    """Return a weight where a target is and in its dtype: itself, if it is there."""
    moved = weight.detach().to(device_of(target), target.dtype if weight.is_floating_point() else None)
    if moved.data_ptr() == weight.data_ptr():
        return weight
    return nn.Parameter(moved, requires_grad=False) if isinstance(weight, nn.Parameter) else moved
