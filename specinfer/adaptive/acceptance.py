"""Which drafted tokens the target accepts: observed rates that correct the drafts' own probabilities.

Knows: the trees of a batch, the tokens that rows emitted.  Does not know: costs, clocks, models, what is decided.

A pass over the weights evicts everything else from the processor's caches.  After it, a Python loop over a few dozen
numbers is faster than array operations, so all rows' nodes are walked as one list.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import exp, prod

from specinfer.tree import Forest, Nodes

DEPTHS = 3  # told apart: 1, 2, 3 and deeper
MEMORY = 200  # tokens that a rate looks back on, about
PRIORS = 0.5, 4.0  # tokens that it starts with: of drafted tokens, of accepted nodes with children


class Rate:
    """Accepted tokens over expected ones, with forgetting.

    Args:
        first: its value before there is experience.
        weight: tokens that this counts for.
    """

    def __init__(self, first: float = 1.0, weight: float = PRIORS[0]) -> None:
        self.accepted, self.expected = weight * first, weight

    @property
    def value(self) -> float:
        """By what an expectation is to be multiplied."""
        return self.accepted / self.expected

    def add(self, accepted: float, expected: float) -> None:
        """Take an observation into account."""
        fade = 1 - 1 / MEMORY
        self.accepted = fade * self.accepted + accepted
        self.expected = fade * self.expected + expected


class Acceptance:
    """How often drafted tokens are accepted, under one way of choosing tokens: greedy, or coupled to the noise.

    Attributes:
        edges: by proposers (a bit mask) and depth, accepted tokens over the sum of their draft probabilities.
        families: by draft and depth of the parent, how often one of an accepted node's children was accepted.
    """

    def __init__(self) -> None:
        self.edges: defaultdict[tuple[int, int], Rate] = defaultdict(Rate)
        self.families: defaultdict[tuple[int, int], Rate] = defaultdict(partial(Rate, 0.5, PRIORS[1]))

    def observe(self, forest: Forest, tokens: Sequence[Sequence[int]]) -> None:
        """Compare what was drafted, scored or not, with what each row emitted."""
        nodes = forest.nodes
        ids, parents, depths, starts = (
            column.tolist() for column in (nodes.tokens, nodes.parents, nodes.depths, nodes.starts)
        )
        proposers, scores = nodes.proposers.tolist(), nodes.scores.tolist()
        right = bytearray(len(nodes))
        asked, found = dict[int, int](), dict[int, int]()  # by right node: who proposed children, and the right one
        for emitted, start, end in zip(tokens, starts, starts[1:], strict=False):
            right[start] = True
            for node in range(start + 1, end):
                parent, depth = parents[node], depths[node]
                if not right[parent] or depth > len(emitted):
                    continue
                right[node] = ids[node] == emitted[depth - 1]
                mask = proposers[node]
                self.edges[mask, min(depth, DEPTHS)].add(right[node], exp(scores[node] - scores[parent]))
                asked[parent] = asked.get(parent, 0) | mask
                found[parent] = found.get(parent, 0) | (mask if right[node] else 0)
        for parent, drafts in asked.items():
            for draft in range(drafts.bit_length()):
                if drafts >> draft & 1:
                    self.families[draft, min(depths[parent], DEPTHS - 1)].add(found[parent] >> draft & 1, 1.0)

    def path(self, nodes: Nodes) -> list[float]:
        """Return for each node of merged trees the probability that its path is accepted; 1 at the roots."""
        columns = (nodes.parents.tolist(), nodes.depths.tolist(), nodes.proposers.tolist())
        scores, reached = nodes.scores.tolist(), list[float]()
        for score, parent, depth, mask in zip(scores, *columns, strict=True):
            if parent < 0:
                reached.append(1.0)
                continue
            rate = self.edges[mask, min(depth, DEPTHS)].value
            reached.append(reached[parent] * min(1.0, exp(score - scores[parent]) * rate))
        return reached

    def edge(self, draft: int, depth: int) -> float:
        """Return the factor for the probabilities of a draft's tokens at a depth, whoever else proposes them."""
        depth = min(depth, DEPTHS)
        rates = [rate for (mask, at), rate in self.edges.items() if at == depth and mask >> draft & 1]
        return sum(rate.accepted for rate in rates) / sum(rate.expected for rate in rates) if rates else 1.0

    def along(self, draft: int, depth: int) -> float:
        """Return the factor for the probabilities of a draft's paths down to a depth."""
        return prod(self.edge(draft, at) for at in range(1, depth + 1))

    def family(self, draft: int, depth: int) -> float:
        """Return how often a child of an accepted node of a depth is accepted."""
        return min(1.0, self.families[draft, min(depth, DEPTHS - 1)].value)

    def expected(self, draft: int, depth: int) -> float:
        """Return how many nodes of a depth are accepted on average."""
        return prod(self.family(draft, above) for above in range(depth))
