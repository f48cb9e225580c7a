"""How the nodes of a batch become one forward pass: which tokens, at which depths, and which node sees which.

Knows: token ids, depths, rows of different sizes.  Does not know: models, caches, how nodes stand in tensors.

A *layout* is flat: the N nodes of all B rows, row after row.  Each row has *pending columns*: those of earlier passes
of the step, then these nodes.  A node attends to its ancestors among its row's pending columns and to itself.  This is
the topology-aware mask of SpecInfer (arXiv 2305.09781, section 4.2).  Every node sees all committed tokens of its row,
so these are not stored.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.common.tensors import on_device
from specinfer.tree import Forest, Frontier, TokenTree

Columns = Sequence[range] | None  # of each row, nodes of a layout; None: all


class Layout(NamedTuple):
    """The nodes of one forward pass over B rows, N in all."""

    tokens: Tensor  # (N,) long
    rows: Tensor  # (N,) long, the row of each node
    columns: Tensor  # (N,) long, the pending column of each node in its row
    visible: Tensor  # (N, S) bool; [n, s] = node n attends to pending column s of its row
    depths: Tensor  # (B, S) long; position of every pending column = committed length + depth
    sizes: Sequence[int]  # nodes of each row
    wanted: Columns = None  # the nodes whose logits are wanted
    extra: Mapping[str, Tensor] = {}  # what else a model's forward takes, by name: (N, ...) each

    @property
    def node_depths(self) -> Tensor:
        """The depth of each node, (N,)."""
        return self.depths.flatten() if self.depths.shape == (1, len(self.tokens)) else self.depths[self[1:3]]


def lay_out_trees(trees: Sequence[TokenTree], device: torch.device, unread: Sequence[Sequence[int]] = ()) -> Layout:
    """Lay out one tree per row, depth first, root included, each below tokens of its row that no pass has read yet.

    Args:
        trees: one per row.
        device: of the tensors.
        unread: token ids per row, possibly none, before the root; logits are wanted of the trees alone.  () = none.
    """
    nodes = Forest.of(trees).nodes
    before = np.array([*map(len, unread)], np.int64) if unread else np.zeros_like(nodes.sizes)
    layout = _Rows(nodes.sizes + before)
    columns = nodes.columns + before[nodes.rows]
    numbers = layout.starts[nodes.rows] + columns
    tokens, depths = np.empty_like(layout.rows), layout.columns.copy()
    tokens[numbers], depths[numbers] = nodes.tokens, nodes.depths + before[nodes.rows]
    layout.ends[nodes.rows, columns] = columns + nodes.subtrees
    if unread:
        tokens[layout.columns < before[layout.rows]] = [*chain(*unread)]
    wanted = [range(first, size) for first, size in zip(before.tolist(), layout.sizes.tolist(), strict=True)]
    return layout.done(tokens, depths, device)._replace(wanted=wanted if before.any() else None)


def lay_out_chains(chains: Sequence[Sequence[int]], device: torch.device) -> Layout:
    """Lay out one chain of tokens per row, possibly none."""
    layout = _Rows(np.array([*map(len, chains)], np.int64))
    return layout.done(np.array([*chain(*chains)], np.int64), layout.columns, device)


class _Rows:
    """Rows of different sizes on the host: chains, until the ends of subtrees say otherwise."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes  # (B,)
        self.starts = np.cumsum(sizes) - sizes  # (B,)
        self.rows = np.repeat(np.arange(len(sizes)), sizes)  # (N,)
        self.columns = np.arange(len(self.rows)) - self.starts[self.rows]  # (N,)
        self.ends = np.tile(sizes[:, None], (1, sizes.max()))  # (B, S), of each column's subtree, which lies together

    def done(self, tokens: np.ndarray, depths: np.ndarray, device: torch.device) -> Layout:
        """Return the layout of nodes with these tokens and depths, (N,) each."""
        every, columns = np.arange(self.ends.shape[1]), self.columns[:, None]
        visible = (every <= columns) & (columns < self.ends[self.rows])
        by_row = np.zeros_like(self.ends)
        by_row[self.rows, self.columns] = depths
        tensors = [on_device(array, device) for array in (tokens, self.rows, self.columns, visible, by_row)]
        return Layout._make([*tensors, self.sizes.tolist(), None, {}])


def lay_out_level(frontier: Frontier, earlier: Layout | None, device: torch.device) -> Layout:
    """Lay out one level of growing trees, whose earlier levels are pending columns already: W nodes of each row.

    The root, node 0, is committed before growth starts.  So level 1 has no pending ancestors, and pending columns are
    nodes 1, 2, ...  ``earlier`` is the layout of the level before, ``None`` at level 1.
    """
    tokens = torch.where(frontier.valid, frontier.tokens, 0).to(device)
    batch, width = tokens.shape
    rows = torch.arange(batch, device=device).repeat_interleave(width)
    visible = torch.eye(width, dtype=torch.bool, device=device).repeat(batch, 1)
    depths = torch.where(frontier.valid, frontier.depth - 1, 0).to(device)
    first = 0 if earlier is None else earlier.depths.shape[1]
    if earlier is not None:
        level, last = earlier.visible.unflatten(0, (batch, -1)), earlier.sizes[0]  # of the level before, in each row
        parents = (frontier.parents.to(device) - (1 + first - last)).clamp(0, last - 1)  # (B, W) within that level
        inherited = level.gather(1, parents[:, :, None].expand(batch, width, first))
        inherited = inherited & frontier.valid.to(device)[:, :, None]
        visible = torch.cat([inherited.flatten(0, 1), visible], 1)
        depths = torch.cat([earlier.depths, depths], 1)
    columns = torch.arange(first, first + width, device=device).repeat(batch)
    return Layout(tokens.flatten(), rows, columns, visible, depths, [width] * batch)
