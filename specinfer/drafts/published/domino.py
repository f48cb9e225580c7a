"""Domino heads (arXiv 2605.29707): DFlash, and a recurrent unit over the path's tokens that corrects the slots' logits.

Knows: the unit, where its correction starts.  Does not know: the layers below it (`dflash_network`), caches, files.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specinfer.drafts.published.dflash_network import DFlashNetwork


class DominoNetwork(DFlashNetwork):
    """The network of a Domino head.

    Args:
        config: as `DFlashNetwork`'s, with ``gru_hidden_dim``, ``emb_dim`` and ``pure_draft_prefix_len``, the number of
            depths that are not corrected, from the first on.
        token_ids, embeds, outputs: as in `DraftNetwork`.
    """

    draft_layers = (0,)

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        super().build(config)
        size, self.path_size = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = nn.ParameterDict()  # a gated recurrent unit without biases, named as by `torch.nn.GRU`
        self.prefix_gru["weight_ih_l0"] = torch.zeros(3 * self.path_size, size)
        self.prefix_gru["weight_hh_l0"] = torch.zeros(3 * self.path_size, self.path_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + self.path_size, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, self.words, bias=False),
        )

    def follow(self, state: Tensor, tokens: Tensor, slots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the state after tokens (B, W) at a depth, and the gain of their children's logits, (B, W, V')."""
        inputs, before = self.embed(tokens).flatten(0, 1), state.flatten(0, 1)
        after = torch.gru_cell(inputs, before, self.prefix_gru["weight_ih_l0"], self.prefix_gru["weight_hh_l0"])
        state = after.view(*tokens.shape, -1)
        if depth < self.config.pure_draft_prefix_len:
            return state, state.new_zeros(())
        return state, self.embed_proj(torch.cat((slots, state), -1))
