"""The network of an EAGLE-style head: small layers that read a target's hidden states and borrow its outer matrices.

Knows: its layers, what it borrows.  Does not know: drafting, how caches work, files, how it is trained.
"""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


def head_config(**fields: Any) -> LlamaConfig:
    """Return a head's configuration: sizes as transformers names them, and ``aux_layers``."""
    return LlamaConfig(**{**fields, "attn_implementation": "sdpa"})


class HeadNetwork(nn.Module):
    """The trainable part, with the forward signature of a ``transformers`` causal LM, so that it runs behind a mask.

    Args:
        config: a Llama configuration of the layer's size (``hidden_size`` is the target's), with ``aux_layers``, the
            hidden states it reads.
        token_ids: (V',) int64 ascending, the target's ids that the head may propose.
    """

    def __init__(self, config: LlamaConfig, token_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        size, aux_layers = config.hidden_size, len(config.aux_layers)
        self.fuse = nn.Linear(aux_layers * size, size, bias=False)  # the target's states -> one
        self.mix = nn.Linear(2 * size, size, bias=False)  # embedding and state -> the layer's input
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids)
        self.embedding: Tensor | None  # (V, H), the target's
        self.cosines: Tensor  # (positions, D)
        self.sines: Tensor
        for name in ("embedding", "cosines", "sines"):  # set by `bind`, and never saved
            self.register_buffer(name, None, persistent=False)
        self.output: nn.Linear | None = None  # rows of the target's, (V', H)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the weights."""
        return self.mix.weight.dtype

    def bind(self, target: Any) -> "HeadNetwork":
        """Borrow a target's embedding and output matrices; return self on the target's device."""
        self.to(target.device)
        self.embedding = target.get_input_embeddings().weight.detach()
        rows = target.get_output_embeddings().weight.detach()[self.token_ids].to(self.dtype)
        if self.output is None:
            self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta").train(self.training)
        self.output.weight = nn.Parameter(rows, requires_grad=False)
        positions = torch.arange(self.config.max_position_embeddings, device=rows.device)
        cosines, sines = LlamaRotaryEmbedding(self.config).to(rows.device)(rows, positions[None])
        self.cosines, self.sines = cosines[0], sines[0]
        return self

    def bound(self, target: Any) -> "HeadNetwork":
        """Return a copy in a target's dtype that is bound to it; weights that fit as they are, are shared."""
        weights = (*self.parameters(), *self.buffers())
        return deepcopy(self, {id(weight): _moved(weight, target) for weight in weights}).bind(target)

    @property
    def pass_inputs(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """The additional inputs of each kind of pass: name -> shape after (B, T)."""
        size = self.config.hidden_size
        return {"target_states": (len(self.config.aux_layers), size)}, {"draft_states": (size,)}

    def get_input_embeddings(self) -> Any:
        """Return what holds the borrowed embedding, as transformers' models do."""
        return SimpleNamespace(weight=self.embedding)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        target_states: Tensor | None = None,
        draft_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> SimpleNamespace:
        """Return ``logits`` (B, T or kept, V') and ``hidden_states``, one (B, T, H), of what follows each token.

        Args:
            input_ids: (B, T) ids of the target.
            attention_mask: (B, 1, T, L), as the attention implementation takes it.
            position_ids: (B, T).
            past_key_values: a cache of `LlamaDecoderLayer`'s keys and values.
            target_states: (B, T, K, H) the target's states that chose the tokens; or else
            draft_states: (B, T, H) the head's own states that did.
            logits_to_keep: columns whose logits are wanted; 0 = all.
        """
        assert self.embedding is not None, "bind the head to a target first"
        assert position_ids is not None
        embedded = functional.embedding(input_ids, self.embedding).to(self.dtype)
        if draft_states is None:
            assert target_states is not None
            draft_states = self.fuse(_normalised(target_states.to(self.dtype)).flatten(2))
        hidden = self.mix(torch.cat((_normalised(embedded), draft_states), -1))
        cosines, sines = (part[position_ids].to(hidden.dtype) for part in (self.cosines, self.sines))
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
                position_embeddings=(cosines, sines),
            )
        hidden = self.norm(hidden)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.logits(kept), hidden_states=(hidden,))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the head's vocabulary of the head's own final states (..., H)."""
        assert self.output is not None, "bind the head to a target first"
        return self.output(states.to(self.output.weight.dtype))


def _moved(weight: Tensor, target: Any) -> Tensor:
    """Return a weight where a target is and in its dtype: itself, if it is there."""
    moved = weight.detach().to(target.device, target.dtype if weight.is_floating_point() else None)
    if moved.data_ptr() == weight.data_ptr():
        return weight
    return nn.Parameter(moved, requires_grad=False) if isinstance(weight, nn.Parameter) else moved


def _normalised(states: Tensor) -> Tensor:
    """Return states with a root mean square of 1: layers differ a thousandfold in scale."""
    return functional.rms_norm(states, states.shape[-1:])
