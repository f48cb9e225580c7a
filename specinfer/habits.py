"""What adaptive trees learn about drafts: how often their tokens are accepted, by probability, depth and rank.

Knows: trees of a batch as arrays, the tokens that rows emitted.  Does not know: costs, clocks, models, what is chosen.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from specinfer.learnt import MEMORY
from specinfer.tree import Forest, Nodes

Floats = NDArray[np.float64]
DEPTHS = 3  # told apart: 1, 2, 3 and deeper


class Outcome:
    """Which drafted nodes the target's own tokens would have accepted.

    Args:
        nodes: all that was drafted, N nodes in B rows, whether the target scored it or not.
        tokens: per row, what it emitted; every child along those was right or wrong.

    Attributes:
        right: (N,) whether a node's path was emitted; the roots' are.
        judged: places of the nodes that were right or wrong: children of right ones, where a token was emitted.
    """

    def __init__(self, nodes: Nodes, tokens: Sequence[Sequence[int]]) -> None:
        emitted = np.full((len(tokens), max(map(len, tokens), default=0) + 1), -1)
        for row, own in enumerate(tokens):
            emitted[row, : len(own)] = own
        depths = np.minimum(nodes.depths, emitted.shape[1]) - 1  # the last column is nobody's
        fits = nodes.tokens == emitted[nodes.rows, depths]
        self.right = nodes.depths == 0
        for depth in range(1, min(nodes.depths.max(), emitted.shape[1] - 1) + 1):
            level = np.flatnonzero((nodes.depths == depth) & fits)
            self.right[level] = self.right[nodes.parents[level]]
        asked = (emitted[nodes.rows, depths] >= 0) & (nodes.depths > 0)
        self.judged = np.flatnonzero(asked & self.right[nodes.parents])


class Calibration:
    """Observed acceptance of drafted tokens whose parent was accepted, by who proposed them, depth and probability.

    Within a bin of the logit, a probability is multiplied by accepted / expected, both counted with forgetting, and
    with `PRIOR` tokens accepted as often as expected.
    """

    PRIOR = 4.0
    FORGET = 0.995  # a step
    CENTRES = 1 / (1 + np.exp(-np.arange(-6.0, 7.0)))  # of the bins, as probabilities

    def __init__(self) -> None:
        self.masks = np.zeros(1, np.int64)  # (M,) ascending: proposers seen, as bit masks
        # (M, depths, bins) how many were expected to be accepted, and how many were
        self.expected, self.accepted = np.zeros((2, 1, DEPTHS, len(self.CENTRES)))

    def observe(self, nodes: Nodes, outcome: Outcome) -> None:
        """Take into account which drafted tokens the target's own would have accepted."""
        judged = outcome.judged
        edges = nodes.scores[judged] - nodes.scores[nodes.parents[judged]]
        place = self.places(nodes.proposers)[judged], np.minimum(nodes.depths[judged], DEPTHS) - 1, _bins(edges)
        np.add.at(self.expected, place, np.exp(edges))
        np.add.at(self.accepted, place, outcome.right[judged])

    def forget(self) -> None:
        """Let everything observed so far weigh a little less."""
        self.expected *= self.FORGET
        self.accepted *= self.FORGET

    def path(self, nodes: Nodes) -> Floats:
        """Return for each node of merged trees the probability that its path is accepted, (N,); 1 at the roots."""
        edges = nodes.scores - nodes.scores[np.maximum(nodes.parents, 0)]
        place = self.places(nodes.proposers), np.clip(nodes.depths, 1, DEPTHS) - 1, _bins(edges)
        reached = self._corrected(edges, self.expected[place], self.accepted[place])
        reached[nodes.depths == 0] = 1.0
        for depth in range(2, nodes.depths.max() + 1):
            level = np.flatnonzero(nodes.depths == depth)
            reached[level] *= reached[nodes.parents[level]]
        return reached

    def edge(self, draft: int, depth: int, log_probs: Floats) -> Floats:
        """Return the probabilities that tokens of one draft are accepted, whether others propose them or not.

        Args:
            draft: its id.
            depth: of the tokens, 1 or more.
            log_probs: the draft's, of any shape.
        """
        bins, mine = _bins(log_probs), self.masks >> draft & 1 > 0
        expected, accepted = (own[mine, min(depth, DEPTHS) - 1].sum(0) for own in (self.expected, self.accepted))
        return self._corrected(log_probs, expected[bins], accepted[bins])

    def places(self, masks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where proposers are counted; there is room for new ones afterwards."""
        found = np.searchsorted(self.masks, masks)
        if (self.masks[np.minimum(found, len(self.masks) - 1)] == masks).all():
            return found
        every = np.union1d(self.masks, masks)
        counts = np.zeros((2, len(every), *self.expected.shape[1:]))
        counts[:, np.searchsorted(every, self.masks)] = self.expected, self.accepted
        self.masks, (self.expected, self.accepted) = every, counts
        return np.searchsorted(every, masks)

    def _corrected(self, log_probs: Floats, expected: Floats, accepted: Floats) -> Floats:
        """Return a draft's probabilities as what was expected of their like, and accepted, makes them."""
        prior = self.PRIOR * self.CENTRES[_bins(log_probs)]
        return np.minimum(1.0, np.exp(log_probs) * (accepted + prior) / (expected + prior))


def _bins(log_probs: Floats) -> NDArray[np.int64]:
    """Return the places of probabilities among `Calibration.CENTRES`."""
    clipped = np.clip(log_probs, -50.0, -1e-9)
    logits = clipped - np.log(-np.expm1(clipped))
    return np.clip(np.rint(np.nan_to_num(logits)), -6, 6).astype(np.int64) + 6


class Ranks:
    """How often the k-th child of an accepted node was accepted, by the node's depth; averages that forget.

    A depth that was hardly seen is taken to be like the one above.
    """

    WIDTH = 8  # ranks told apart
    MEMORY = 4 * MEMORY
    PRIOR = 4  # families that the rates to begin with count as
    SEEN = 12  # families, those included, from which on a depth speaks for itself

    def __init__(self) -> None:
        self.rates = np.tile(0.25 * 0.5 ** np.arange(self.WIDTH), (DEPTHS, 1))  # of the root, 1, 2 and deeper
        self.counts = [self.PRIOR] * DEPTHS

    def observe(self, depth: int, families: int, hits: Floats) -> None:
        """Take families into account whose parents, all of one depth, were accepted.

        Args:
            depth: of the parents.
            families: how many.
            hits: (WIDTH,) in how many the child of each rank was accepted.
        """
        place = min(depth, DEPTHS - 1)
        self.counts[place] = min(self.counts[place] + families, self.MEMORY)
        share = families / self.counts[place]
        self.rates[place] += min(share, 1.0) * (hits / families - self.rates[place])
        below = self.rates[place + 1 :]  # what is not asked about any more: little by little
        below += min(1.0, families / (4 * self.MEMORY)) * (self.rates[place] - below)

    def at(self, depth: int) -> Floats:
        """Return how often the children of an accepted node of a depth are accepted, by rank, (WIDTH,)."""
        place = min(depth, DEPTHS - 1)
        while place and self.counts[place] < self.SEEN:
            place -= 1
        return self.rates[place]

    def expected(self, depth: int) -> float:
        """Return how many nodes of a depth are accepted on average."""
        return prod(min(1.0, float(self.at(above).sum())) for above in range(depth))

    def surplus(self, depth: int, accepted: Floats, price: float) -> Floats:
        """Return the tokens that the children of nodes are expected to gain beyond what they cost, like ``accepted``.

        Args:
            depth: of the nodes.
            accepted: their probabilities of acceptance.
            price: tokens that a child must gain to pay for itself.
        """
        return np.maximum(accepted[..., None] * self.at(depth) - price, 0.0).sum(-1)


class Habits:
    """What was learnt about drafts under one way of choosing tokens: greedy, or coupled to the noise."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.ranks: defaultdict[int, Ranks] = defaultdict(Ranks)  # by draft

    def observe(self, forest: Forest, tokens: Sequence[Sequence[int]]) -> None:
        """Compare what was drafted with what each row emitted."""
        nodes = forest.nodes
        outcome = Outcome(nodes, tokens)
        self.calibration.forget()
        self.calibration.observe(nodes, outcome)
        self._rank(nodes, outcome)

    def _rank(self, nodes: Nodes, outcome: Outcome) -> None:
        """Take into account which of each draft's children were right."""
        judged = np.zeros(len(nodes), bool)
        judged[outcome.judged] = True
        drawn = nodes.draws
        mine = judged[drawn.nodes]
        children, drafts, ranks = drawn.nodes[mine], drawn.drafts[mine], nodes.ranks[mine]
        parents = nodes.parents[children]
        for draft in np.unique(drafts).tolist():
            own = drafts == draft
            families = np.unique(parents[own])
            won = own & outcome.right[children] & (ranks < Ranks.WIDTH)
            hits = np.zeros((int(nodes.depths[families].max()) + 1, Ranks.WIDTH))
            np.add.at(hits, (nodes.depths[parents[won]], ranks[won]), 1.0)
            counts = np.bincount(nodes.depths[families])
            for depth in np.flatnonzero(counts).tolist():
                self.ranks[draft].observe(depth, int(counts[depth]), hits[depth])
