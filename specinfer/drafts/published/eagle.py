"""EAGLE-1, EAGLE-2 and HASS heads, which are one network.

Knows: tensor names, the layers' formulas.  Does not know: drafting, caches.

The head's input is the target's last state after its final norm, beside the token's embedding, fused by one matrix
(EAGLE, arXiv 2401.15077, section 4.1; EAGLE-2, arXiv 2406.16858, and HASS, arXiv 2408.15766, keep the network).  The
first layer does not norm it, nothing is normed at the end, and the state that is handed on goes to the target's output
matrix as it is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig

from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.checkpoint import Checkpoint
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.eagle3 import layer_fields, layers_of, load_network, read_weights
from specinfer.drafts.published.layers import DecoderLayer, Reading, network_config
from specinfer.drafts.published.network import AutoregressiveNetwork, Mask, OpenSession


class EagleNetwork(AutoregressiveNetwork):
    """An EAGLE-1 head.

    Args:
        config: a Llama's, of the head's sizes, which are the target's; ``fc_bias``: whether the matrix has a bias.
        token_ids, embeds, outputs: as `DraftNetwork`.
    """

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        self.num_states, self.target_size = 1, config.hidden_size
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        layers = [DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        layers[0].input_layernorm = nn.Identity()
        self.layers = nn.ModuleList(layers)

    def conventions(self, layers: int) -> list[Convention]:
        """Return how it is read; the format leaves nothing open."""
        return [Convention((layers,))]

    def next_states(self, states: Tensor, tokens: Tensor, mask: Mask, positions: Tensor, cache: Cache | None) -> Tensor:
        """Return the states that are handed on, (B, T, H)."""
        assert not isinstance(mask, Mapping)
        reading = Reading(mask, self.rotary(positions, self.dtype), cache)
        states = self.fc(torch.cat((tokens, states), -1))
        for layer in self.layers:
            states = layer(states, reading)
        return states


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is an EAGLE-1 head's, which has no norm of the states that it reads."""
    if (named := checkpoint.named("eagle")) is not None:
        return named
    names = {name.removeprefix("model.") for name in checkpoint.weights}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and "hidden_norm.weight" not in names


def load(checkpoint: Checkpoint) -> tuple[EagleNetwork, OpenSession]:
    """Return a checkpoint's network and the function that opens its session.

    Raises:
        ModelError: something is missing, unknown or contradictory.
    """
    weights = read_weights(checkpoint)
    fields = layer_fields(layers_of(checkpoint), weights)
    has_bias = checkpoint.config.get("bias") is not False  # absent, it is true
    config = network_config(**fields, target_hidden_size=fields["hidden_size"], fc_bias=has_bias)
    return load_network(checkpoint, weights, config, EagleNetwork), HeadDraftSession
