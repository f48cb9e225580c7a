"""DSpark heads: DFlash, and small networks over its slots that score each token after its parent.

Knows: the Markov heads (first-order, gated, recurrent), the confidence head.
Does not know: the layers below them (`dflash_network`), caches, files.

The first-order head adds ``w2[child] . w1[parent]`` to a logit, the gated one multiplies w1[parent] by a gate that
reads the slot (deepseek-ai/DeepSpec, speculators' ``dspark``).  The recurrent one carries a state along the path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from specinfer.attention import TreeModel
from specinfer.drafts.published.block import BlockSession, PathSession
from specinfer.drafts.published.dflash_network import DFlashNetwork
from specinfer.engine.draft import DraftContext
from specinfer.tree import Frontier

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

    def gated(self, parents: Tensor, slots: Tensor | None) -> Tensor:
        """Return the vectors (..., r) of parents (...), gated by the states (..., H) of the slots after them."""
        vectors = self.markov_w1(parents)
        if self.gate_proj is None:
            return vectors
        assert slots is not None
        return vectors * self.gate_proj(torch.cat((slots, vectors), -1)).sigmoid()

    def step(self, state: Tensor, parents: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recurrent state (..., r) after parents (...), and the gain of all logits, (..., V')."""
        assert self.joint_proj is not None
        joint = self.joint_proj(torch.cat((state, self.markov_w1(parents), slots), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), self.markov_w2(output.tanh())


class DSparkNetwork(DFlashNetwork):
    """The network of a DSpark head.

    Attributes:
        use_confidence: whether a path's probability is multiplied by the confidence in its tokens.

    Args:
        config: of `block_config`, with ``markov_rank`` (0: no Markov head), ``markov_head_type``,
            ``enable_confidence_head`` and ``confidence_head_with_markov``.
        token_ids, embeds, outputs: as in `DraftNetwork`.
    """

    use_confidence = False
    path_size: int  # width of the state that the recurrent head carries along a path

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        super().build(config)
        rank = self.path_size = config.markov_rank
        self.markov_head = MarkovHead(config, self.words) if rank else None
        width = config.hidden_size + (rank if config.confidence_head_with_markov else 0)
        confidence = nn.ModuleDict({"proj": nn.Linear(width, 1)})  # in a slot's token, if those above are right
        self.confidence_head = confidence if config.enable_confidence_head else None
        if self.confidence_head or (rank and config.markov_head_type != "vanilla"):
            self.draft_layers = (0,)

    def follow(self, state: Tensor, tokens: Tensor, slots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the state after tokens (B, W) at a depth, and the gain of their children's logits, (B, W, V')."""
        assert self.markov_head is not None
        return self.markov_head.step(state, tokens, slots)

    def log_confidence(self, parents: Tensor, slots: Tensor) -> Tensor:
        """Return the log of the chance that a child of each parent (...) is accepted, by its slot (..., H): (...)."""
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            slots = torch.cat((slots, self.markov_head.markov_w1(parents)), -1)
        return functional.logsigmoid(self.confidence_head["proj"](slots))[..., 0]


class DSparkSession(BlockSession):
    """A DSpark head at work whose children depend on their parent's token alone; without a Markov head on nothing."""

    def __init__(self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> None:
        super().__init__(model, aux_layers, context)
        self.width = WIDTH if self.network.markov_head else None

    def pairs(self, parents: Tensor, children: Tensor, depths: slice) -> Tensor:
        """Return the gain of children's logits after each parent, (B, D, A, K)."""
        head = self.network.markov_head
        slots = self._slots(depths, parents.shape[2])
        return head.gated(parents, slots) @ head.markov_w2.weight[children].mT

    def confidence(self, parents: Tensor, depths: slice) -> Tensor | None:
        """Return the log of the chance that any child of a parent (B, D, A) is accepted; None: it is not used."""
        if not self.network.use_confidence:
            return None
        return self.network.log_confidence(parents, self._slots(depths, parents.shape[2]))

    def _slots(self, depths: slice, count: int) -> Tensor | None:
        """Return the states of some slots for each of `count` parents, (B, D, A, H); None: the head reads none."""
        return None if self.slot_states is None else self.slot_states[:, depths, None].expand(-1, -1, count, -1)


class RecurrentSession(PathSession):
    """A DSpark head with a recurrent Markov head at work."""

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest choices of the target and their log-probabilities, both (B, W, k)."""
        tokens, log_probs = super().top(frontier, k)
        if not self.network.use_confidence:
            return tokens, log_probs
        parents, slots = self.nodes(frontier)
        return tokens, log_probs + self.network.log_confidence(parents, slots)[..., None]
