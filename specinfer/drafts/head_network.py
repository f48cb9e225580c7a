"""The network of an EAGLE-style head: small layers that read a target's hidden states and borrow its outer matrices.

Knows: its layers, what it borrows.  Does not know: drafting, how caches work, files, how it is trained.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from specinfer.attention.forward import cache_name
from specinfer.drafts.published.network import AutoregressiveNetwork, Mask

CACHE = cache_name(LlamaDecoderLayer.forward)


class HeadNetwork(AutoregressiveNetwork):
    """The trainable part; it borrows both matrices.

    Args:
        config: of `network_config`, of the layer's size (``hidden_size`` is the target's), with ``aux_layers``, the
            hidden states it reads.
        token_ids: (V',) int64 ascending, the target's ids that the head may propose.
    """

    skips_first = False
    token_ids: Tensor

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        size = config.hidden_size
        self.num_states, self.target_size = len(config.aux_layers), size
        self.fuse = nn.Linear(self.num_states * size, size, bias=False)  # the target's states -> one
        self.mix = nn.Linear(2 * size, size, bias=False)  # embedding and state -> the layer's input
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)

    def fused(self, states: Tensor) -> Tensor:
        """Return the target's states (B, T, K, H) as one, (B, T, H)."""
        return self.fuse(_normalised(states).flatten(2))

    def next_states(self, states: Tensor, tokens: Tensor, mask: Mask, positions: Tensor, cache: Cache | None) -> Tensor:
        """Return the states that are handed on, (B, T, H); the cache is of `LlamaDecoderLayer`'s keys and values."""
        hidden = self.mix(torch.cat((_normalised(tokens), states), -1))
        reading: dict[str, object] = {"attention_mask": mask, "position_ids": positions, CACHE: cache}
        reading |= {"use_cache": cache is not None, "position_embeddings": self.rotary(positions, hidden.dtype)}
        for layer in self.layers:
            hidden = layer(hidden, **reading)
        return self.norm(hidden)


def _normalised(states: Tensor) -> Tensor:
    """Return states with a root mean square of 1: layers differ a thousandfold in scale."""
    return functional.rms_norm(states, states.shape[-1:])
