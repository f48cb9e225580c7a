"""Sessions of block heads: one pass a step, over the block's slots and the tokens committed since the last one.

Knows: how a block and new context become columns of a pass, what each row has not fed yet.
Does not know: networks, how candidates of several depths become a tree (`lattice`).
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.attention import Layout, TreeModel, lay_out_chains
from specinfer.common.tensors import on_device
from specinfer.drafts.depths import DepthsSession, LatticeSession
from specinfer.drafts.rows import CATCH_UP, CachedRows, LevelRows, begun, state_columns
from specinfer.engine.draft import Committed, DraftContext, Scored, States
from specinfer.tree import Frontier


class BlockRows(CachedRows, DepthsSession):
    """A block head at work, however it answers a policy.

    The context of a row is every token but the root: the target's states at them.  A text of a single token has none,
    and its block reads itself alone.

    Args:
        model: with a `DFlashNetwork`.
        aux_layers: the target's hidden states that it reads.
        context: of the session.
    """

    def __init__(self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> None:
        super().__init__(context)
        self.network, self.token_ids, self.depth = model.model, model.model.token_ids, model.model.depth
        slots = self.network.config.block_size + CATCH_UP
        capacities = context.capacity + slots, context.max_capacity + slots
        self.session = model.session(self.batch, *capacities, self.network.draft_layers, context.graphs)
        self.columns = state_columns(aux_layers, context, model.device)
        nothing = torch.zeros(0, len(aux_layers), self.network.target_size, dtype=model.dtype, device=model.device)
        left = begun(self.session, context.prompts, context.known)
        self.uncached = [  # per row, the target's states at tokens that are not in the cache
            nothing if states is None else states[len(states) - len(tokens) + 1 :, self.columns].to(nothing)
            for tokens, states in zip(left, context.states, strict=True)
        ]
        self.slot_states: Tensor | None = None  # (B, D, H) of this step, for heads that read them

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels can be predicted: all, if the block ends within the head's context."""
        longest = sys.maxsize if self.limit is None else self.limit - self.network.config.block_size
        return [self.depth if length <= longest else 0 for length in self.lengths]

    def predict(self) -> Tensor:
        """Feed a block and the uncached context; keep the context: logits (B, D, V') of depths 1 ... D."""
        config, device = self.network.config, self.session.model.device
        self.catch_up()
        states, self.uncached = self.uncached, [row[:0] for row in self.uncached]
        counts = [len(row) for row in states]
        size, width = config.block_size, self.session.repeated.width(config.block_size + max(counts))
        layout = lay_out_blocks(self.roots, config.mask_token_id, size, counts, device, width)
        wanted = [range(size - self.depth, size)] * len(counts)
        slots = states[0].new_zeros(size, *states[0].shape[1:])
        fed = torch.cat([part for row in states for part in (slots, row)])
        logits = self.session.append(layout, wanted, block_states=fed)
        if self.network.draft_layers:
            self.slot_states = self.session.aux_states.pop().part(wanted).padded()[:, :, 0]
        self.session.commit([range(size, size + count) for count in counts])
        return logits.padded()

    def read_ahead(self) -> None:
        """Feed and commit all uncached context."""
        self.session.prefill([[0] * len(row) for row in self.uncached], target_states=self.uncached)
        self.uncached = [row[:0] for row in self.uncached]

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take the states at the root and at the accepted tokens as context, and the last token as the next root."""
        self.session.commit([None if new is None else () for new in tokens])
        for row, (new, chose) in enumerate(zip(tokens, states, strict=True)):
            if new is not None and chose is not None:
                self.uncached[row] = torch.cat((self.uncached[row], chose[:, self.columns].to(self.uncached[row])))
        super().commit(tokens, states, scored)


class BlockSession(BlockRows, LatticeSession):
    """A block head whose depths are independent; or, if its network has a `width`, depend on the parent alone."""

    def __init__(self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> None:
        super().__init__(model, aux_layers, context)
        self.width = self.network.width

    def pairs(self, parents: Tensor, children: Tensor, depths: slice) -> Tensor:
        """Return the gain of children's logits after each parent, (B, D, A, K)."""
        slots = None if self.slot_states is None else self.slot_states[:, depths]
        return self.network.pairs(parents, children, slots)


class PathSession(LevelRows, BlockRows):
    """A block head with a small recurrent network along the path: it answers level by level, without passes.

    Its network has a `path_size`, and `follow`.
    """

    def __init__(self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> None:
        super().__init__(model, aux_layers, context)
        self.device = model.device  # of the answers
        self.carried: list[Tensor] = []  # (B, W, path_size) of each level's nodes in this step

    def logits_after(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V') after frontier nodes; keep their states for the nodes below."""
        base = self.logits[:, frontier.depth, None]
        tokens = self._parents(frontier)[:, 0]
        assert self.slot_states is not None
        slots = self.slot_states[:, frontier.depth, None].expand(-1, tokens.shape[1], -1)  # below the nodes
        if frontier.depth == 0:
            self.carried = []
            above = slots.new_zeros(len(slots), 1, self.network.path_size)
        else:
            every, parents = torch.cat(self.carried, 1), frontier.parents.to(self.device)
            above = every.gather(1, parents[..., None].expand(-1, -1, every.shape[2]))
        state, gained = self.network.follow(above, tokens, slots, frontier.depth)
        self.carried.append(state)
        return (base + gained).expand(-1, tokens.shape[1], -1)


def lay_out_blocks(
    roots: Sequence[int], mask_token: int, size: int, counts: Sequence[int], device: torch.device, width: int = 0
) -> Layout:
    """Lay out a block per row, then its new context.

    Every slot sees all slots and its row's context.  Of the context only keys and values are used.

    Args:
        roots: last committed token of each row.
        mask_token: in the other slots.
        size: slots of a block.
        counts: tokens of each row's new context; they come before the root.
        device: of the layout.
        width: nodes that each row is padded to, behind its own, for a head's block comes first; 0 = none is.
    """
    block = [mask_token] * (size - 1)
    chains = [[root, *block, *[0] * count] for root, count in zip(roots, counts, strict=True)]
    layout = lay_out_chains(chains, device, width, at_end=False)
    columns, count = layout.columns, on_device(list(counts), device)
    is_slot, every = columns < size, torch.arange(layout.visible.shape[1], device=device)
    within = every < size + count[layout.rows, None]
    visible = torch.where(is_slot[:, None], within, every == columns[:, None])
    depths = torch.where(every < size, every + count[:, None], (every - size).clamp(max=count[:, None] - 1))
    return layout._replace(visible=visible).at_depths(depths)
