"""Drafts that predict all depths of a tree at once: their session, whatever network they have.

Knows: logits of all depths, scores of neighbours.  Does not know: networks, caches, checkpoint formats.

The logits of depth d are the same whatever the tree's tokens above are.  A draft may add a score to each pair of a
parent and a child; then the K best tokens of a depth are its candidates, and the distribution after a parent is the
softmax of `logit + pair score` over them, times their share of the depth's probability.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from specinfer.common.tensors import on_device
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import DraftContext
from specinfer.tree import Frontier, Lattice, Source


class DepthsSession(DraftRows):
    """A draft that predicts all depths at once, at work.

    Subclasses set `depth`, give `predict`, and answer a policy.
    """

    depth: int  # D, how many depths are predicted
    device = torch.device("cpu")  # of the answers
    roots: Sequence[int]  # per row, its last committed token in this step
    _predicted: Tensor | None = None  # logits (B, D, V') of this step

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels can be predicted: all or none."""
        return [self.depth] * self.batch

    @abstractmethod
    def predict(self) -> Tensor:
        """Run the step's pass: logits (B, D, V') of depths 1 ... D.  Only called in steps in which it is asked."""

    @abstractmethod
    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest children and their log-probabilities, both (B, W, k)."""

    @abstractmethod
    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node: see `Source.draw`."""

    def source(self, roots: Sequence[int]) -> Source:
        """Return the session itself; nothing is predicted yet."""
        self.roots, self._predicted = roots, None
        return self

    @property
    def logits(self) -> Tensor:
        """Logits (B, D, V') of this step."""
        if self._predicted is None:
            self._predicted = self.predict()
        return self._predicted

    def _parents(self, frontier: Frontier) -> Tensor:
        """Return the tokens of frontier nodes, (B, 1, W)."""
        return self._roots() if frontier.depth == 0 else on_device(frontier.tokens, self.logits.device)[:, None]

    def _roots(self) -> Tensor:
        """Return the roots, (B, 1, 1)."""
        return on_device(self.roots, self.logits.device)[:, None, None]


class LatticeSession(DepthsSession):
    """A draft that predicts all depths at once and scores nothing but neighbours: a `LatticeSource` on the host.

    Subclasses that score pairs give `pairs` and set `width`.
    """

    width: int | None = None  # candidates of a depth, if pairs are scored

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        self._lattices: dict[int, Lattice] = {}  # of this step, by width

    def pairs(self, parents: Tensor, children: Tensor, depths: slice) -> Tensor:
        """Return what the logits of children gain after each parent, (B, D, A, K).

        Args:
            parents: (B, D, A) ids of the target's tokens that may stand above.
            children: (B, D, K) indices in the draft's vocabulary.
            depths: which D of all depths.
        """
        raise NotImplementedError

    def source(self, roots: Sequence[int]) -> Source:
        """Return the session itself; nothing is predicted yet."""
        self._lattices = {}
        return super().source(roots)

    def lattice(self, width: int) -> Lattice:
        """Return the candidates of all depths; with scored pairs as many as the draft's width."""
        width = min(self.width or width, self.logits.shape[-1])
        if width not in self._lattices:
            self._lattices[width] = self._ranked_lattice(width, slice(None))
        return self._lattices[width]

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest children and their log-probabilities; fewer, if there are fewer candidates.

        With scored pairs, nodes may hold tokens that are no candidates of their depth.
        """
        if self.width is None:
            level, depth = self.lattice(k), frontier.depth
        else:
            depths = slice(frontier.depth, frontier.depth + 1)
            level, depth = self._ranked_lattice(self.width, depths, self._parents(frontier)), 0
        found = (torch.from_numpy(table[:, depth, :, :k]) for table in (level.tokens, level.log_probs))
        children, log_probs = (table.expand(-1, frontier.tokens.shape[1], -1) for table in found)
        return children, log_probs

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node; with scored pairs from the candidates alone."""
        logits, count = self.logits[:, frontier.depth : frontier.depth + 1], frontier.tokens.shape[1]
        if self.width is None:
            dense = self.warped(logits.float()).cpu().expand(-1, count, -1)
        else:
            indices, _ = self.ranked(logits, [frontier.depth], self.width)
            joint = self._joint(logits, indices, self._parents(frontier), slice(frontier.depth, frontier.depth + 1))
            scores = torch.full_like(logits, -inf, dtype=torch.float32).expand(-1, count, -1).clone()
            scores.scatter_(2, indices.expand(-1, count, -1), joint[:, 0])
            dense = self.warped(scores).cpu()
        return self.drawn(dense, k, replacement, frontier.depth)

    def _ranked_lattice(self, width: int, depths: slice, parents: Tensor | None = None) -> Lattice:
        """Return the lattice of the `width` best tokens of some depths.

        Args:
            width: K.
            depths: which D.
            parents: (B, D, A) tokens above; None = each depth's candidates are those of the next.
        """
        logits, numbers = self.logits[:, depths], range(self.depth)[depths]
        indices, log_probs = self.ranked(logits, numbers, width)
        if self.width is None:
            return Lattice.of(self.ids(indices), log_probs[:, :, None])
        if parents is None:
            parents = torch.cat([self._roots().expand(-1, -1, indices.shape[2]), self.ids(indices[:, :-1])], 1)
        joint = self._joint(logits, indices, parents, depths)  # (B, D, A, K)
        noise = self.noise_of(numbers, logits.shape[-1], indices, logits.device)
        spread = None if noise is None else noise[:, :, None].expand_as(joint).flatten(1, 2)
        joint = self.scored(joint.flatten(1, 2), spread).view_as(joint)
        share = log_probs.logsumexp(-1)[:, :, None, None]  # of the depth's probability, that the candidates have
        return Lattice.of(self.ids(indices), joint.log_softmax(-1) + share)

    def _joint(self, logits: Tensor, indices: Tensor, parents: Tensor, depths: slice) -> Tensor:
        """Return logit plus pair score of children after each parent, (B, D, A, K)."""
        return logits.gather(2, indices)[:, :, None].float() + self.pairs(parents, indices, depths).float()
