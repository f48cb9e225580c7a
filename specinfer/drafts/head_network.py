"""The network of an EAGLE-style head: small layers that read a target's hidden states and borrow its outer matrices.

Knows: its layers, what it borrows.  Does not know: drafting, how caches work, files, how it is trained.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from specinfer.drafts.published.network import DraftNetwork


def head_config(**fields: Any) -> LlamaConfig:
    """Return a head's configuration: sizes as transformers names them, and ``aux_layers``."""
    return LlamaConfig(**{**fields, "attn_implementation": "sdpa"})


class HeadNetwork(DraftNetwork):
    """The trainable part; it borrows both matrices.

    Args:
        config: a Llama configuration of the layer's size (``hidden_size`` is the target's), with ``aux_layers``, the
            hidden states it reads.
        token_ids: (V',) int64 ascending, the target's ids that the head may propose.
    """

    token_ids: Tensor

    def __init__(self, config: LlamaConfig, token_ids: Tensor) -> None:
        super().__init__(config, token_ids)
        size, aux_layers = config.hidden_size, len(config.aux_layers)
        self.fuse = nn.Linear(aux_layers * size, size, bias=False)  # the target's states -> one
        self.mix = nn.Linear(2 * size, size, bias=False)  # embedding and state -> the layer's input
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)

    @property
    def pass_inputs(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """The additional inputs of each kind of pass: name -> shape after (B, T)."""
        size = self.config.hidden_size
        return {"target_states": (len(self.config.aux_layers), size)}, {"draft_states": (size,)}

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
        assert position_ids is not None
        embedded = self.embed(input_ids)
        if draft_states is None:
            assert target_states is not None
            draft_states = self.fuse(_normalised(target_states.to(self.dtype)).flatten(2))
        hidden = self.mix(torch.cat((_normalised(embedded), draft_states), -1))
        rotary = self.rotary(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
                position_embeddings=rotary,
            )
        hidden = self.norm(hidden)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.logits(kept), hidden_states=(hidden,))


def _normalised(states: Tensor) -> Tensor:
    """Return states with a root mean square of 1: layers differ a thousandfold in scale."""
    return functional.rms_norm(states, states.shape[-1:])
