"""What adaptive trees learn about drafts: how often their tokens are accepted, by probability, depth and rank.

Knows: the trees of a batch, the tokens that rows emitted.  Does not know: costs, clocks, models, what is chosen.

Between two passes nothing is in the processor's caches, and a loop over some dozens of numbers is quicker than a few
operations on arrays; so all rows' nodes are walked as one list.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from math import exp, log, prod

from specinfer.adaptive.cost_model import MEMORY
from specinfer.tree import Forest, Nodes

DEPTHS = 3  # told apart: 1, 2, 3 and deeper
Counts = list[list[list[float]]]  # by depth and bin: expected, accepted


class Outcome:
    """Which drafted nodes the target's own tokens would have accepted.

    Args:
        nodes: all that was drafted, whether the target scored it or not.
        tokens: per row, what it emitted; every child along those was right or wrong.

    Attributes:
        right: by node, whether its path was emitted; the roots' are.
        judged: the nodes that were right or wrong: children of right ones, where a token was emitted.
        parents, depths: of the nodes.
    """

    def __init__(self, nodes: Nodes, tokens: Sequence[Sequence[int]]) -> None:
        self.parents, self.depths = nodes.parents.tolist(), nodes.depths.tolist()
        self.right, self.judged = bytearray(len(nodes)), list[int]()
        ids, starts = nodes.tokens.tolist(), nodes.starts.tolist()
        for emitted, start, end in zip(tokens, starts, starts[1:], strict=False):
            self.right[start] = True
            for node in range(start + 1, end):
                if self.right[self.parents[node]] and self.depths[node] <= len(emitted):
                    self.judged.append(node)
                    self.right[node] = ids[node] == emitted[self.depths[node] - 1]


class Calibration:
    """Observed acceptance of drafted tokens whose parent was accepted, by who proposed them, depth and probability.

    Within a bin of the logit, a probability is multiplied by accepted / expected, both counted with forgetting, and
    with `PRIOR` tokens accepted as often as expected.
    """

    PRIOR = 4.0
    FORGET = 0.995  # a step
    CENTRES = tuple(1 / (1 + exp(-logit)) for logit in range(-6, 7))  # of the bins, as probabilities
    BORDERS = tuple(-log(1 + exp(-logit - 0.5)) for logit in range(-6, 6))  # between them, as log-probabilities

    def __init__(self) -> None:
        self.counts: defaultdict[int, Counts] = defaultdict(self._nothing)  # by proposers, a bit mask; in units
        self.unit = 1.0  # what one of now counts; it grows, so what is older counts for less

    def observe(self, nodes: Nodes, outcome: Outcome) -> None:
        """Take into account which drafted tokens the target's own would have accepted."""
        proposers, scores = nodes.proposers.tolist(), nodes.scores.tolist()
        for node in outcome.judged:
            edge = scores[node] - scores[outcome.parents[node]]
            counts = self.counts[proposers[node]][min(outcome.depths[node], DEPTHS) - 1][bisect(self.BORDERS, edge)]
            counts[0] += self.unit * exp(edge)
            counts[1] += self.unit * outcome.right[node]

    def forget(self) -> None:
        """Let everything observed so far weigh a little less."""
        self.unit /= self.FORGET
        if self.unit > 1e100:
            for counts in (bin_ for own in self.counts.values() for depth in own for bin_ in depth):
                counts[:] = [counts[0] / self.unit, counts[1] / self.unit]
            self.unit = 1.0

    def path(self, nodes: Nodes) -> list[float]:
        """Return for each node of merged trees the probability that its path is accepted; 1 at the roots."""
        columns = (nodes.parents.tolist(), nodes.depths.tolist(), nodes.proposers.tolist())
        scores, reached = nodes.scores.tolist(), list[float]()
        for score, parent, depth, mask in zip(scores, *columns, strict=True):
            if parent < 0:
                reached.append(1.0)
                continue
            edge = score - scores[parent]
            place = bisect(self.BORDERS, edge)
            expected, accepted = self.counts[mask][min(depth, DEPTHS) - 1][place]
            factor = self._factor(expected, accepted, place)
            reached.append(reached[parent] * min(1.0, exp(edge) * factor))
        return reached

    def edges(self, draft: int, depth: int) -> list[float]:
        """Return by what the probabilities of a draft's tokens are multiplied, by bin, whoever else proposes them.

        Args:
            draft: its id.
            depth: of the tokens, 1 or more.
        """
        mine = [own[min(depth, DEPTHS) - 1] for mask, own in self.counts.items() if mask >> draft & 1]
        return [
            self._factor(sum(own[place][0] for own in mine), sum(own[place][1] for own in mine), place)
            for place in range(len(self.CENTRES))
        ]

    def accepted(self, factors: Sequence[float], log_prob: float) -> float:
        """Return the probability that a token is accepted, from its draft's and `edges`."""
        return min(1.0, exp(log_prob) * factors[bisect(self.BORDERS, log_prob)])

    def _factor(self, expected: float, accepted: float, place: int) -> float:
        """Return what was accepted of what was expected to be, in a bin."""
        prior = self.PRIOR * self.CENTRES[place] * self.unit
        return (accepted + prior) / (expected + prior)

    @classmethod
    def _nothing(cls) -> Counts:
        return [[[0.0, 0.0] for _ in cls.CENTRES] for _ in range(DEPTHS)]


class Ranks:
    """How often the k-th child of an accepted node was accepted, by the node's depth; averages that forget.

    A depth that was hardly seen is taken to be like the one above.
    """

    WIDTH = 8  # ranks told apart
    MEMORY = 4 * MEMORY
    PRIOR = 4  # families that the rates to begin with count as
    SEEN = 12  # families, those included, from which on a depth speaks for itself

    def __init__(self) -> None:
        self.rates = [[0.25 * 0.5**rank for rank in range(self.WIDTH)] for _ in range(DEPTHS)]  # of the root, 1, 2 ...
        self.counts = [self.PRIOR] * DEPTHS

    def observe(self, depth: int, rank: int | None) -> None:
        """Take a family into account whose parent, of that depth, was accepted: which child was, None for none."""
        place = min(depth, DEPTHS - 1)
        self.counts[place] = min(self.counts[place] + 1, self.MEMORY)
        share, rates = 1 / self.counts[place], self.rates[place]
        rates[:] = [rate + share * ((turn == rank) - rate) for turn, rate in enumerate(rates)]
        for below in self.rates[place + 1 :]:  # what is not asked about any more: little by little
            below[:] = [low + (rate - low) / (4 * self.MEMORY) for low, rate in zip(below, rates, strict=True)]

    def at(self, depth: int) -> list[float]:
        """Return how often the children of an accepted node of a depth are accepted, by rank."""
        place = min(depth, DEPTHS - 1)
        while place and self.counts[place] < self.SEEN:
            place -= 1
        return self.rates[place]

    def expected(self, depth: int) -> float:
        """Return how many nodes of a depth are accepted on average."""
        return prod(min(1.0, sum(self.at(above))) for above in range(depth))

    def surplus(self, depth: int, accepted: float, price: float) -> float:
        """Return the tokens that the children of a node are expected to gain beyond what they cost.

        Args:
            depth: of the node.
            accepted: its probability of acceptance.
            price: tokens that a child must gain to pay for itself.
        """
        return sum([accepted * rate - price for rate in self.at(depth) if accepted * rate > price])


class Habits:
    """What was learnt about drafts under one way of choosing tokens: greedy, or coupled to the noise."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.ranks: defaultdict[int, Ranks] = defaultdict(Ranks)  # by draft

    def observe(self, forest: Forest, tokens: Sequence[Sequence[int]]) -> None:
        """Compare what was drafted with what each row emitted."""
        outcome = Outcome(forest.nodes, tokens)
        self.calibration.forget()
        self.calibration.observe(forest.nodes, outcome)
        self._rank(forest.nodes, outcome)

    def _rank(self, nodes: Nodes, outcome: Outcome) -> None:
        """Take into account which of each draft's children were right."""
        judged = bytearray(len(nodes))
        for node in outcome.judged:
            judged[node] = True
        families: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # by parent and draft
        for node, draft, order in zip(*(column.tolist() for column in nodes.draws), strict=True):
            if judged[node]:
                families[outcome.parents[node], draft].append((order, node))
        for (parent, draft), children in families.items():
            ranked = [outcome.right[node] for _, node in sorted(children)]
            self.ranks[draft].observe(outcome.depths[parent], ranked.index(True) if True in ranked else None)
