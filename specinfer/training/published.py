"""Losses of the networks of published formats: EAGLE-3 heads, Medusa heads, block heads (DFlash, DSpark).

Knows: which columns each depth is learnt at, how blocks share one pass.
Does not know: optimisation, what networks start from, files.

All read texts without their first token, which no state chose.  So the state of column i chose token i, and is the
target's state at the token before.  The states that networks fuse are divided by the typical size of each of their
entries while they are trained: entries differ a thousandfold.  What is kept has the division in its matrix.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.drafts.published.dflash_network import DFlashNetwork
from specinfer.drafts.published.dspark import DSparkNetwork
from specinfer.drafts.published.eagle3 import Eagle3Network
from specinfer.drafts.published.medusa import ResidualBlock
from specinfer.drafts.unrolled import unrolled_logits
from specinfer.training.data import Texts
from specinfer.training.job import TrainingSettings
from specinfer.training.losses import EVERY, DistillationLoss

BLOCKS = 3 / 8  # blocks per token to learn, so that a text is learnt from about as often as by an unrolled head
SCALE_BATCHES = 8  # of text that the typical sizes of states are measured on


class FusedLoss(DistillationLoss):
    """The loss of a network that fuses states of several layers.

    Args:
        network: bound to the target.
        target, settings: as `DistillationLoss`.
        scales: (K, H) typical sizes of the states' entries.
    """

    scales: Tensor

    def __init__(self, network: Any, target: Any, settings: TrainingSettings, scales: Tensor) -> None:
        super().__init__(target, settings, network.token_ids)
        self.network = network
        self.register_buffer("scales", scales)

    def fused(self, states: Tensor) -> Tensor:
        """Return what the network reads of states (B, T, K + 1, H), whose last layer is the target's output."""
        return states[:, :, :-1] / self.scales

    @torch.no_grad()
    def fold_scales(self) -> None:
        """Let the network read states as they are."""
        self.network.fc.weight.div_(self.scales.flatten())
        self.scales.fill_(1)


class Eagle3Loss(FusedLoss):
    """An EAGLE-3 head's loss, unrolled over several draft steps (arXiv 2503.01840, training-time test)."""

    network: Eagle3Network

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[tuple[Tensor, slice | Tensor]]:
        """See `unrolled_logits`."""
        for logits in unrolled_logits(self.network, ids, self.fused(states), keep, self.settings.unroll):
            yield logits, EVERY


class MedusaLoss(DistillationLoss):
    """The loss of Medusa heads (arXiv 2401.10774, section 2.2.1: the target is frozen).

    Their output matrices are the target's, of which only the rows of ``token_ids`` are worked out.
    """

    def __init__(self, target: Any, settings: TrainingSettings, token_ids: Tensor) -> None:
        super().__init__(target, settings, token_ids)
        output = target.get_output_embeddings().weight.detach()
        self.blocks = nn.ModuleList(ResidualBlock(output.shape[1]) for _ in range(settings.heads)).to(output.device)
        for weight in self.parameters():
            nn.init.zeros_(weight)  # then a head proposes what the target chose before
        self.rows = output[token_ids.to(output.device)].float()

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[tuple[Tensor, slice | Tensor]]:
        """Yield each head's logits: head d reads the state d columns before the one whose token it proposes."""
        columns, last = ids.shape[1] - 1, states[:, :-1, -1].flatten(0, 1)
        for depth, block in enumerate(self.blocks):
            which = (keep % columns >= depth).nonzero()[:, 0]
            read = block(last[keep[which] - depth].to(self.rows.dtype))
            yield functional.linear(read, self.rows), which


class BlockLoss(FusedLoss):
    """The loss of a block head (DFlash, arXiv 2602.06036; DSpark): blocks at random tokens, in one pass.

    Each block reads the context up to its root, and itself.
    """

    network: DFlashNetwork

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[tuple[Tensor, slice | Tensor]]:
        """Yield the logits of each depth, after the text's own tokens."""
        columns = ids.shape[1] - 1
        index = torch.full((len(ids), columns), -1, device=ids.device)  # of each column among the kept ones
        index.view(-1)[keep] = torch.arange(len(keep), device=ids.device)
        roots, real = chosen_roots(index >= 0)
        hidden = self.hidden(ids[:, :-1], states[:, :-1], roots)
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(roots)
        first = 0 if self.network.from_anchor else 1
        for depth in range(self.network.depth):
            column = (roots + depth).clamp(max=columns - 1)  # the parent's
            which = index[rows, column]
            learnt = real & (roots + depth < columns) & (which >= 0)
            yield self.logits(hidden[:, :, first + depth][learnt], ids[rows, column][learnt]), which[learnt]

    def logits(self, states: Tensor, parents: Tensor) -> Tensor:
        """Return logits (M, V') of slots' states (M, H), below the tokens (M,)."""
        return self.network.logits(states)

    def hidden(self, ids: Tensor, states: Tensor, roots: Tensor) -> Tensor:
        """Return the slots' last states (B, A, S, H) of blocks.

        Args:
            ids: (B, C).
            states: (B, C, K + 1, H).
            roots: (B, A) the columns of their roots.
        """
        config, slots = self.network.config, self.network.config.block_size
        inputs = ids.new_full((*roots.shape, slots), config.mask_token_id)
        inputs[:, :, 0] = ids.gather(1, roots)
        columns = torch.arange(ids.shape[1], device=ids.device)
        positions = roots[:, :, None] + 1 + torch.arange(slots, device=ids.device)
        output = self.network(
            torch.cat([inputs.flatten(1), ids], 1),
            block_mask(roots, slots, ids.shape[1]),
            torch.cat([positions.flatten(1), columns.expand_as(ids)], 1),
            target_states=self.fused(states),
            logits_to_keep=columns[:0],
        )
        return output.hidden_states[0].unflatten(1, (-1, slots))


class DSparkLoss(BlockLoss):
    """A DSpark head's loss: each slot's token is scored after the text's own token before it."""

    network: DSparkNetwork

    def logits(self, states: Tensor, parents: Tensor) -> Tensor:
        """Return logits (M, V') of slots' states (M, H), below the tokens (M,)."""
        head = self.network.markov_head
        assert head is not None
        return self.network.logits(states) + head.markov_w2(head.gated(parents, None))


def chosen_roots(learn: Tensor) -> tuple[Tensor, Tensor]:
    """Return random roots (B, A) of blocks, and which of them are real, for some texts have fewer.

    Args:
        learn: (B, C) which columns may be roots.
    """
    count = max(1, round(BLOCKS * int(learn.sum(1).max())))
    chance = torch.rand(learn.shape, device=learn.device).masked_fill(~learn, -1)
    best = chance.topk(min(count, learn.shape[1]), 1)
    return best.indices, best.values >= 0


def block_mask(roots: Tensor, slots: int, columns: int) -> Tensor:
    """Return what slots attend to, bool (B, 1, A S, A S + C): the context up to their root, and their own block.

    Args:
        roots: (B, A).
        slots: S, of a block.
        columns: C, of the context.
    """
    block = torch.arange(roots.shape[1], device=roots.device).repeat_interleave(slots)
    context = torch.arange(columns, device=roots.device)
    same = (block[:, None] == block).expand(len(roots), -1, -1)
    before = context <= roots.repeat_interleave(slots, 1)[:, :, None]
    return torch.cat([same, before], 2)[:, None]


@torch.no_grad()
def typical_sizes(texts: Texts, settings: TrainingSettings) -> Tensor:
    """Return the root mean square of the entries of all states but the target's output, (K, H) float32."""
    total, count = torch.zeros(()), 0
    for chosen in texts.batches(texts.train, settings.tokens_per_batch, None)[:SCALE_BATCHES]:
        batch = texts.load(chosen)
        states = batch.states[:, 1:, :-1][batch.learn].float()
        total, count = total + states.square().sum(0), count + len(states)
    return (total / max(count, 1)).sqrt().clamp(min=1e-6)
