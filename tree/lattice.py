"""Candidate lattices: the distributions of all depths of a tree at once, and the best-first tree over them.

Knows: a few candidates at every depth, and their log-probabilities after each candidate of the depth above.
Does not know: models, how candidates were chosen, verification.

A draft that predicts several depths in one pass (DFlash, arXiv 2602.06036; Medusa, arXiv 2401.10774) gives K candidates
a depth.  If it also scores pairs of neighbours (DFlash 2, DSpark), what may follow a node depends on its token, and on
nothing else above it.  Either way, all nodes with one token at one depth have the same children.  So these are sorted
once, and best-first needs no pass and no further sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import NumericalError

# a node: token, parent (0 is the root, node i is i + 1), path score
Grown = tuple[int, int, float]


@dataclass(frozen=True, eq=False)
class Lattice:
    """Candidates of D depths in B rows, in host memory; every list of children is sorted, ties by the smaller token.

    Attributes:
        tokens: (B, D, A, K) int64, the children of a node by its token: lists for the K candidates of the depth above,
            and a last one for any other token; or A = 1 list for all.  At depth 1 only the first counts, the root's.
        log_probs: (B, D, A, K), descending; -inf = no child.
        indices: (B, D, A, K) int64, which candidate of its depth a child is.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    indices: np.ndarray

    @classmethod
    def of(cls, candidates: Tensor, log_probs: Tensor) -> Lattice:
        """Sort the lists of children on their device, and bring them to the host.

        Args:
            candidates: (B, D, K) int64, different tokens at each depth.
            log_probs: (B, D, A, K) of each candidate after those of the depth above and, last, after any other token
                (A = K + 1); or whatever is above (A = 1).

        Raises:
            NumericalError: a log-probability is not a number.
        """
        candidates, order = candidates.sort(-1)  # so that a stable sort breaks ties by the smaller token
        lists = log_probs.shape[2]
        log_probs = log_probs.gather(3, order[:, :, None].expand(-1, -1, lists, -1))
        if lists > 1 and order.shape[1] > 1:  # those of the depth above have moved, too; depth 1 has none
            above = torch.arange(lists, device=order.device).repeat(*order.shape[:2], 1)
            above[:, 1:, :-1] = order[:, :-1]
            log_probs = log_probs.gather(2, above[..., None].expand_as(log_probs))
        values, indices = log_probs.sort(dim=-1, descending=True, stable=True)
        tokens = candidates[:, :, None].expand_as(indices).gather(3, indices)
        if bool(values.isnan().any()):
            raise NumericalError("a draft's log-probability is not a number: check its weights")
        return cls(tokens.cpu().numpy(), values.float().cpu().numpy(), indices.cpu().numpy())

    @property
    def depth(self) -> int:
        """D, the number of depths."""
        return self.tokens.shape[1]

    def lists(self, tokens: Tensor, depth: int) -> np.ndarray:
        """Return which list of children each node (B, W) of a depth has."""
        if depth == 0 or self.tokens.shape[2] == 1:
            return np.zeros(tuple(tokens.shape), np.int64)
        known = np.zeros_like(self.tokens[:, depth - 1, 0])  # (B, K) candidates by key
        np.put_along_axis(known, self.indices[:, depth - 1, 0], self.tokens[:, depth - 1, 0], 1)
        same = known[:, None] == tokens.cpu().numpy()[:, :, None]
        return np.where(same.any(-1), same.argmax(-1), self.tokens.shape[2] - 1)

    def children(self, tokens: Tensor, depth: int, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest children of nodes (B, W), and their log-probabilities, both (B, W, min(k, K))."""
        lists = self.lists(tokens, depth)[:, :, None]
        found = (np.take_along_axis(table[:, depth], lists, 1)[..., :k] for table in (self.tokens, self.log_probs))
        children, log_probs = map(torch.from_numpy, found)
        return children, log_probs

    def best_first(self, row: int, max_nodes: int, max_depth: int, least: float = -inf) -> list[Grown]:
        """Return the likeliest paths of a row, best first: the tree of a heap over all paths.

        Equal scores are ranked by smaller depth, then by the parents' ranks, then by sibling rank, as `BestFirst` does.

        Args:
            row: which.
            max_nodes, max_depth: at most.
            least: the smallest score of a node.
        """
        depth_limit, single = min(max_depth, self.depth), self.tokens.shape[2] == 1
        lists: dict[tuple[int, int], list[float]] = {}  # log-probabilities by depth and list
        heap: list[tuple[float, int, int, int, int, float]] = []  # -score, depth, parent, rank, list, parent's score
        nodes: list[Grown] = []

        def push(depth: int, parent: int, rank: int, which: int, above: float) -> None:
            known = lists.get((depth, which))
            if known is None:
                known = lists[depth, which] = self.log_probs[row, depth - 1, which].tolist()
            if rank < len(known):
                score = above + min(known[rank], 0.0)
                if score >= least and score > -inf:
                    heappush(heap, (-score, depth, parent, rank, which, above))

        if depth_limit and max_nodes:
            push(1, 0, 0, 0, 0.0)
        while heap and len(nodes) < max_nodes:
            score, depth, parent, rank, which, above = heappop(heap)
            child = row, depth - 1, which, rank
            nodes.append((int(self.tokens[child]), parent, -score))
            push(depth, parent, rank + 1, which, above)
            if depth < depth_limit:
                push(depth + 1, len(nodes), 0, 0 if single else int(self.indices[child]), -score)
        return nodes
