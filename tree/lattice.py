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
from specinfer.tree.forest import ROOT, Growth, Listing


@dataclass(frozen=True, eq=False)
class Lattice:
    """Candidates of D depths in B rows, in host memory; every list of children is sorted, ties by the smaller token.

    Attributes:
        tokens: (B, D, A, K) int64, the children of a node by its token: a list for each of the A = K candidates of the
            depth above, or A = 1 for all of them.  At depth 1 only the first counts, the root's.
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
            log_probs: (B, D, A, K) of each candidate after those of the depth above (A = K), or whatever is above
                (A = 1).  If D is 1, the A lists may be of any nodes.

        Raises:
            NumericalError: a log-probability is not a number.
        """
        candidates, order = candidates.sort(-1)  # so that a stable sort breaks ties by the smaller token
        lists = log_probs.shape[2]
        log_probs = log_probs.gather(3, order[:, :, None].expand(-1, -1, lists, -1))
        if lists > 1 and order.shape[1] > 1:  # those of the depth above have moved as well; depth 1 has none
            above = torch.cat([torch.arange(lists, device=order.device).expand_as(order[:, :1]), order[:, :-1]], 1)
            log_probs = log_probs.gather(2, above[..., None].expand_as(log_probs))
        values, indices = log_probs.sort(dim=-1, descending=True, stable=True)
        tokens = candidates[:, :, None].expand_as(indices).gather(3, indices)
        packed = torch.stack([tokens, indices, values.float().view(torch.int32).long()]).cpu().numpy()  # one wait
        found = packed[2].astype(np.int32).view(np.float32)
        if np.isnan(found).any():
            raise NumericalError("a draft's log-probability is not a number: check its weights")
        return cls(packed[0], found, packed[1])

    @property
    def depth(self) -> int:
        """D, the number of depths."""
        return self.tokens.shape[1]

    def best_first(self, max_nodes: int, max_depth: int, least: float = -inf) -> Growth:
        """Return the likeliest paths of every row, best first: the tree of a heap over all paths.

        Equal scores are ranked by smaller depth, then by the parents' ranks, then by sibling rank, as `BestFirst` does.

        Args:
            max_nodes, max_depth: at most.
            least: the smallest score of a node.
        """
        return Growth.listed([self._row(row, max_nodes, max_depth, least) for row in range(len(self.tokens))])

    def _row(self, row: int, max_nodes: int, max_depth: int, least: float) -> list[Listing]:
        """Return the tree of a row, root first."""
        depth_limit, single = min(max_depth, self.depth), self.tokens.shape[2] == 1
        lists: dict[tuple[int, int], list[float]] = {}  # log-probabilities by depth and list
        heap: list[tuple[float, int, int, int, int, float]] = []  # -score, depth, parent, rank, list, parent's score
        nodes = [ROOT]

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
        while heap and len(nodes) <= max_nodes:
            score, depth, parent, rank, which, above = heappop(heap)
            child = row, depth - 1, which, rank
            nodes.append((int(self.tokens[child]), parent, -score))
            push(depth, parent, rank + 1, which, above)
            if depth < depth_limit:
                push(depth + 1, len(nodes) - 1, 0, 0 if single else int(self.indices[child]), -score)
        return nodes
