"""How nodes become columns of one forward pass: a ragged batch of trees, chains or levels, padded to one shape.

Knows: token ids, depths, which node sees which.  Does not know: models, caches, attention kernels.

A *layout* describes the T nodes that a pass feeds to each of B rows.  It says which of the S pending columns (those of
earlier passes of the step, then these T) each node attends to: its ancestors and itself.  This is the topology-aware
mask of SpecInfer (arXiv 2305.09781, section 4.2).  Every node sees all committed tokens, so these are not stored.
Padding nodes see only themselves, which keeps softmax rows finite.  A pass that takes the nodes of all rows side by
side leaves them out (`packing`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.common.tensors import on_device
from specinfer.tree import Forest, Frontier, TokenTree, ancestors


class Layout(NamedTuple):
    """The nodes of one forward pass over B rows."""

    tokens: Tensor  # (B, T) long; 0 in padding
    depths: Tensor  # (B, S) long; position of every pending column = committed length + depth
    visible: Tensor  # (B, T, S) bool; [b, t, s] = node t attends to pending column s
    sizes: tuple[int, ...] = ()  # of each row, where S = T: the first so many nodes are no padding; () = not known

    @property
    def width(self) -> int:
        """T, the nodes fed per row."""
        return self.tokens.shape[1]

    def padded(self, more: int) -> "Layout":
        """Return the layout of the only pass of a step, T = S, with more nodes of padding."""
        if not more:
            return self
        tokens, depths = pad(self.tokens, (0, more)), pad(self.depths, (0, more))
        diagonal = torch.eye(self.width + more, dtype=torch.bool, device=tokens.device)
        return Layout(tokens, depths, pad(self.visible, (0, more, 0, more)) | diagonal, self.sizes)


def lay_out_trees(trees: Sequence[TokenTree], device: torch.device) -> Layout:
    """Lay out one tree per row, depth first, root included: T = S = the largest tree."""
    nodes = Forest.of(trees).nodes
    visible = ancestors(nodes)
    tokens, depths = np.zeros((2, *visible.shape[:2]), np.int64)
    tokens[nodes.rows, nodes.columns] = nodes.tokens
    depths[nodes.rows, nodes.columns] = nodes.depths
    tensors = [on_device(array, device) for array in (tokens, depths, visible)]
    return Layout(tensors[0], tensors[1], tensors[2], tuple(nodes.sizes.tolist()))


def lay_out_chains(chains: Sequence[Sequence[int]], device: torch.device) -> Layout:
    """Lay out one chain of tokens per row, padded on the right: T = S = the longest chain."""
    width = max(len(chain) for chain in chains)
    tokens = on_device([[*chain, *[0] * (width - len(chain))] for chain in chains], device)
    lengths = on_device([len(chain) for chain in chains], device)
    columns = torch.arange(width, device=device)
    real = columns < lengths[:, None]  # (B, T)
    causal = columns[:, None] >= columns  # (T, S)
    visible = torch.where(real[:, :, None], causal, columns[:, None] == columns)
    return Layout(tokens, columns * real, visible, tuple(map(len, chains)))


def lay_out_behind(
    chains: Sequence[Sequence[int]], trees: Sequence[TokenTree], device: torch.device, aligned: bool = True
) -> tuple[Layout, list[range]]:
    """Lay out one chain of tokens per row, and behind its end a tree: T = S.  Return the columns of the chains, too.

    Args:
        chains: token ids per row, possibly none.
        trees: one per row.
        device: of the tensors.
        aligned: whether chains are padded on the left, so that all trees begin in the same column.  Else rows are
            padded on the right.
    """
    nodes = Forest.of(trees).nodes
    above, longest, width = ancestors(nodes), max(map(len, chains)), int(nodes.sizes.max())
    sizes = [len(chain) + int(size) for chain, size in zip(chains, nodes.sizes, strict=True)]
    columns = longest + width if aligned else max(sizes)
    tokens, depths = np.zeros((2, len(chains), columns), np.int64)
    visible = np.tile(np.eye(columns, dtype=bool), (len(chains), 1, 1))
    starts = [longest - len(chain) if aligned else 0 for chain in chains]
    for row, (chain, first) in enumerate(zip(chains, starts, strict=True)):
        read = slice(first, first + len(chain))
        behind = slice(read.stop, read.stop + len(trees[row]))
        tokens[row, read], depths[row, read] = chain, range(len(chain))
        visible[row, read, read] = np.tri(len(chain), dtype=bool)
        visible[row, behind, read] = True
        visible[row, behind, behind] = above[row, : len(trees[row]), : len(trees[row])]
        tokens[row, behind], depths[row, behind] = trees[row].tokens, trees[row].depths + len(chain)
    tensors = [on_device(array, device) for array in (tokens, depths, visible)]
    read_columns = [range(first, first + len(chain)) for first, chain in zip(starts, chains, strict=True)]
    return Layout(tensors[0], tensors[1], tensors[2], () if aligned else tuple(sizes)), read_columns


def lay_out_level(frontier: Frontier, earlier: Layout | None, device: torch.device) -> Layout:
    """Lay out one level of growing trees, whose earlier levels are pending columns already.

    The root, node 0, is committed before growth starts.  So level 1 has no pending ancestors, and pending columns are
    nodes 1, 2, ...  ``earlier`` is the layout of the level before, ``None`` at level 1.
    """
    tokens = torch.where(frontier.valid, frontier.tokens, 0).to(device)
    batch, width = tokens.shape
    diagonal = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)
    depths = torch.where(frontier.valid, frontier.depth - 1, 0).to(device)
    if earlier is None:
        return Layout(tokens, depths, diagonal)
    columns = earlier.visible.shape[2]
    first = 1 + columns - earlier.width  # the first node of the level that `earlier` fed
    parents = (frontier.parents.to(device) - first).clamp(0, earlier.width - 1)  # (B, T) within that level
    inherited = earlier.visible.gather(1, parents[:, :, None].expand(batch, width, columns))
    inherited = inherited & frontier.valid.to(device)[:, :, None]
    return Layout(tokens, torch.cat([earlier.depths, depths], 1), torch.cat([inherited, diagonal], 2))
