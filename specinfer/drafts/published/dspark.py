"""DSpark heads: DFlash, and small networks over its slots that score each token after its parent.

Knows: the Markov heads (first-order, gated, recurrent).
Does not know: the layers below them (`dflash_network`), caches, files.

The first-order head adds ``w2[child] . w1[parent]`` to a logit, the gated one multiplies w1[parent] by a gate that
reads the slot (deepseek-ai/DeepSpec, speculators' ``dspark``).  The recurrent one carries a state along the path.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specinfer.drafts.published.dflash_network import DFlashNetwork

WIDTH = 16  # candidates of a depth whose pairs are scored


class MarkovHead(nn.Module):
    """The gain of a token's logit after its parent, by a product of two small vectors.

    Args:
        config: with ``markov_rank``, ``markov_head_type`` ("vanilla", "gated" or "rnn") and ``vocab_size``, the
            target's.
        words: size of the draft's vocabulary.
    """

    def __init__(self, config: LlamaConfig, words: int) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)  # of parents
        self.markov_w2 = nn.Linear(rank, words, bias=False)  # of children
        self.gate_proj = nn.Linear(size + rank, rank) if config.markov_head_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if config.markov_head_type == "rnn" else None

    def pairs(self, parents: Tensor, children: Tensor, slots: Tensor | None) -> Tensor:
        """Return scores (B, D, A, K) of children (B, D, K) after parents (B, D, A).

        Those of parents may be gated by the states (B, D, H) of the slots after them.
        """
        vectors = self.markov_w1(parents)
        if self.gate_proj is not None:
            assert slots is not None
            slots = slots[:, :, None].expand(*parents.shape, -1)
            vectors = vectors * self.gate_proj(torch.cat((slots, vectors), -1)).sigmoid()
        return vectors @ self.markov_w2.weight[children].mT

    def step(self, state: Tensor, parents: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recurrent state (..., r) after parents (...), and the gain of all logits, (..., V')."""
        assert self.joint_proj is not None
        joint = self.joint_proj(torch.cat((state, self.markov_w1(parents), slots), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), self.markov_w2(output.tanh())


class DSparkNetwork(DFlashNetwork):
    """The network of a DSpark head.

    Args:
        config: as `DFlashNetwork`'s, with ``markov_rank`` (0: no Markov head) and ``markov_head_type``.
        token_ids, embeds, outputs: as in `DraftNetwork`.
    """

    markov_head: MarkovHead

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        super().build(config)
        if not config.markov_rank:
            return
        self.markov_head = MarkovHead(config, self.words)
        if config.markov_head_type == "rnn":
            self.path_size = config.markov_rank
        else:
            self.width = WIDTH
        if config.markov_head_type != "vanilla":
            self.draft_layers = (0,)

    def pairs(self, parents: Tensor, children: Tensor, slots: Tensor | None) -> Tensor:
        """Return the gain of children's logits after each parent: see `MarkovHead`."""
        return self.markov_head.pairs(parents, children, slots)

    def follow(self, state: Tensor, tokens: Tensor, slots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the state after tokens (B, W) at a depth, and the gain of their children's logits, (B, W, V')."""
        return self.markov_head.step(state, tokens, slots)
