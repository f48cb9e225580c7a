"""DFlash 2 heads: DFlash with convolutions along the block, and a selector that scores pairs of candidates.

Knows: both, as z-lab/dflash defines them.  Does not know: the layers around them (`dflash_network`), caches, files.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig

from specinfer.drafts.published.dflash_network import BlockLayer, DFlashNetwork
from specinfer.drafts.published.layers import Reading


class Convolution(nn.Module):
    """Short convolutions along the block before and after a sublayer; channels of a group share what slots add to them.

    Args:
        config: with ``conv_kernel_size``, the number of slots read (its own, then those before), and
            ``conv_group_size``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, reach = config.hidden_size, config.conv_kernel_size
        self.group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, reach, size))
        self.kernel_projection = nn.Linear(size, 2 * reach * size // self.group, bias=False)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sublayer's output for states (B, slots, H), convolved before and after."""
        added = self.kernel_projection(states).unflatten(2, (*self.base_kernel.shape[:2], -1))
        kernels = (self.base_kernel + added.repeat_interleave(self.group, -1)).unbind(2)  # two of (B, slots, reach, H)
        return _convolved(sublayer(_convolved(states, kernels[0])), kernels[1])


def _convolved(states: Tensor, kernel: Tensor) -> Tensor:
    """Return the sum over t of kernel[t] times the state t slots before, none before the block."""
    slots = states.shape[1]
    return sum((kernel[:, :, t] * pad(states, (0, 0, t, 0))[:, :slots] for t in range(kernel.shape[2])), 0 * states)


class ConvolvedLayer(BlockLayer):
    """A layer of slots with convolutions around attention and MLP.

    Args:
        config: as `DFlashNetwork`'s.
        index: of the layer in the cache.
    """

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def forward(self, hidden: Tensor, reading: Reading, context: Tensor) -> Tensor:
        """Return the slots' next states, (B, slots, H): see `BlockLayer`."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.attention_conv(normed, lambda states: self.attend(states, context, reading))
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class Selector(nn.Module):
    """Scores of pairs of candidates: a product of a vector of each, weighted by the child's slot.

    Args:
        config: with ``selector_rank``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))

    def forward(self, parents: Tensor, children: Tensor, slots: Tensor) -> Tensor:
        """Return scores (B, D, A, K) of children (B, D, K) in slots (B, D, H) after parents (B, D, A)."""
        weighted = self.predecessor_codebook[parents] * self.hidden_projection(slots)[:, :, None]
        return weighted @ self.successor_codebook[children].mT


class DFlash2Network(DFlashNetwork):
    """The network of a DFlash 2 head.

    Args:
        config: as `DFlashNetwork`'s, with what `Convolution` and `Selector` need, and ``selector_top_k``.
        token_ids: None, as the selector knows all of the target's tokens.
        embeds, outputs: as in `DraftNetwork`.
    """

    draft_layers = (0,)
    layer_type = ConvolvedLayer

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        super().build(config)
        self.candidate_selector, self.width = Selector(config), config.selector_top_k

    def pairs(self, parents: Tensor, children: Tensor, slots: Tensor) -> Tensor:
        """Return the gain of children's logits after each parent: see `Selector`."""
        return self.candidate_selector(parents, children, slots)
