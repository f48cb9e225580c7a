"""What a policy asks a draft for, and what it has grown: the nodes of B rows, on the device of the distributions.

Knows: tensors, the numbers of nodes (`nodes`).  Does not know: policies, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import TreeError
from specinfer.tree.forest import Forest
from specinfer.tree.nodes import Draws, Listed
from specinfer.tree.token_tree import Kind

Listing = tuple[int, int, float]  # a node in a list on the host: token, parent, log-probability of the path
ROOT: Listing = (-1, -1, 0.0)
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}  # whole numbers that hold those of a type


class Frontier(NamedTuple):
    """The nodes whose next-token distributions a policy asks for: one level of B trees.

    Node 0 of a row is its root, the first frontier; those of later frontiers follow in order, padding included.
    """

    tokens: Tensor  # (B, W) int64; -1 at the root, which the source knows; any real id in padding
    parents: Tensor  # (B, W) int64 numbers of nodes; -1 at the root, any earlier node in padding
    valid: Tensor  # (B, W) bool; False = padding
    depth: int  # of these nodes; the root's is 0

    @classmethod
    def roots(cls, rows: int, device: torch.device) -> Frontier:
        """Return the first frontier."""
        unknown = torch.full((rows, 1), -1, device=device)
        return cls(unknown, unknown, torch.ones_like(unknown, dtype=torch.bool), 0)

    @classmethod
    def chain(cls, tokens: Tensor, depth: int, valid: Tensor | None = None) -> Frontier:
        """Return a level of one node a row, (B, 1), below the one node of the level before."""
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        return cls(tokens, torch.full_like(tokens, depth - 1), valid, depth)

    def narrowed(self, width: int) -> Frontier:
        """Return the first nodes."""
        tokens, parents, valid, depth = self
        return Frontier(tokens[:, :width], parents[:, :width], valid[:, :width], depth)


class Growth(NamedTuple):
    """The trees of B rows, M slots each, on the device of the distributions: slot i is node i, and slot 0 the root."""

    tokens: Tensor  # (B, M) int64; -1 at the root, which `trees` is told
    parents: Tensor  # (B, M) int64 numbers of nodes; -1 at the root
    scores: Tensor  # (B, M) log-probability of the path, float32 or float64; 0 at the root
    valid: Tensor  # (B, M) bool; False = no node
    kind: Kind
    distributions: tuple[Tensor, ...] = ()  # sampled: (B, W, V) per level; joined: of nodes 0, 1, ...

    @classmethod
    def listed(cls, rows: Sequence[Sequence[Listing]]) -> Growth:
        """Return ranked trees that are listed on the host, the root first."""
        width = max(map(len, rows))
        table = np.zeros((3, len(rows), width))
        for row, nodes in enumerate(rows):
            table[:, row, : len(nodes)] = np.array(nodes).T  # ids are below 2 ** 53
        tokens, parents = torch.from_numpy(table[:2].astype(np.int64))
        valid = torch.from_numpy(np.arange(width) < np.array([[len(nodes)] for nodes in rows]))
        return cls(tokens, parents, torch.from_numpy(table[2]), valid, Kind.RANKED)

    def to_host(self, *beside: Tensor) -> tuple[Growth, list[Tensor]]:
        """Bring the trees, but for their distributions, and other tensors to the host in one transfer.

        Args:
            *beside: of truth values, int64, float32 or float64.
        """
        tokens, parents, scores, valid, *others = _fetched((*self[:4], *beside))
        return self._replace(tokens=tokens, parents=parents, scores=scores, valid=valid), others

    def trees(self, roots: Sequence[int], draft: int = 0) -> Forest:
        """Bring the trees to the host.  Waits for the device.

        Args:
            roots: the last committed token of each row.
            draft: the id of the draft that grew them, for `Draw.draft`.

        Raises:
            TreeError: the number of roots is not the number of rows, slot 0 is no root, or a draft's log-probability is
                not a number.
        """
        if len(roots) != len(self.tokens):
            raise TreeError(f"{len(roots)} roots for {len(self.tokens)} grown trees")
        if self.tokens.shape[1] == 1:
            return Forest(self.kind, roots)
        tokens, parents, scores, valid = (column.numpy() for column in _fetched(self[:4]))
        row_of = valid.nonzero()[0]
        numbers = np.cumsum(valid).reshape(valid.shape) - 1  # through all rows
        above = np.take_along_axis(numbers, parents, 1)[valid]
        tokens, parents, scores = tokens[valid], parents[valid], scores[valid].astype(np.float64)
        if not np.isfinite(scores).all():
            raise TreeError(f"a node of row {row_of[~np.isfinite(scores)][0]} has a score that is not a number")
        is_root = parents < 0
        if np.count_nonzero(is_root) != len(roots):
            raise TreeError("slot 0 of a grown tree is its root, with parent -1, and no other node has that parent")
        tokens[is_root], above[is_root] = roots, -1
        drafted = np.flatnonzero(~is_root)
        listed = Listed(
            tokens,
            above,
            scores,
            Draws(drafted, np.full(len(drafted), draft), drafted),  # draws of one node stand in slot order
            self._distributions(row_of[drafted], parents[drafted], above[drafted], draft),
            distinct=self.kind is not Kind.IID,
        )
        return Forest(self.kind, roots, listed)

    def _distributions(
        self, rows: np.ndarray, nodes: np.ndarray, numbers: np.ndarray, draft: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """Return the distributions below some nodes of rows, by the nodes' numbers through all rows."""
        if not self.distributions:
            return {}
        dense = torch.cat(self.distributions, 1).cpu().double().numpy()
        dense.flags.writeable = False
        drawn = zip(rows.tolist(), nodes.tolist(), numbers.tolist(), strict=True)
        return {(number, draft): dense[row, node] for row, node, number in drawn}


def on_host(device: torch.device) -> bool:
    """Whether a value of a tensor there is read without waiting."""
    return device.type == "cpu"


def _fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring tensors to the host, in one transfer if any is on a device, which is waited for."""
    device = next((tensor.device for tensor in tensors if not on_host(tensor.device)), None)
    if device is None:
        return [*tensors]
    whole = [tensor.view(BITS.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
    packed = torch.cat([part.to(device, torch.int64).flatten() for part in whole]).cpu()
    parts = zip(packed.split([part.numel() for part in whole]), whole, tensors, strict=True)
    return [part.to(bits.dtype).view(tensor.dtype).view(tensor.shape) for part, bits, tensor in parts]
