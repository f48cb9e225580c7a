"""Which drafted tokens the target accepts: observed rates that correct the drafts' own probabilities.

Knows: the trees of a batch, the tokens that rows emitted.  Does not know: costs, clocks, models, what is decided.

A pass over the weights evicts everything else from the processor's caches.  After it, a Python loop over a few dozen
numbers is faster than array operations, so all rows' nodes are walked as one list.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import exp, prod, sqrt

from specinfer.adaptive.cost_model import Average
from specinfer.tree import Forest, Nodes

DEPTHS = 3  # told apart: 1, 2, 3 and deeper
MEMORY = 200  # tokens that a rate looks back on, about
PRIOR = 0.5  # tokens that it starts with
TRIAL = 2  # steps in which an idle draft is tried; twice as many at first
WAITS = 8, 64  # idle steps after the first trial that failed, and, by rows, at most


class Rate:
    """Accepted tokens over expected ones, with forgetting.

    Args:
        first: its value before there is experience.
    """

    def __init__(self, first: float = 1.0) -> None:
        self.accepted, self.expected = PRIOR * first, PRIOR

    @property
    def value(self) -> float:
        """By what an expectation is to be multiplied."""
        return self.accepted / self.expected

    def add(self, accepted: float, expected: float) -> None:
        """Take an observation into account."""
        fade = 1 - 1 / MEMORY
        self.accepted = fade * self.accepted + accepted
        self.expected = fade * self.expected + expected


class DraftRecord:
    """Whether a draft pays: what it gained of late, and how long it is idle where that was too little.

    The wait doubles with every trial that fails, and a trial that goes well resets it.

    Attributes:
        net: tokens a row that it gained in the last steps that asked it, less those that its seconds are worth.
        squares: of these.
        trial: steps that are left before it is judged.
        idle: steps that are left before it is asked again.
        wait: steps that it is idle next time.
    """

    def __init__(self) -> None:
        self.wait, self.idle = WAITS[0], 0
        self._try(2 * TRIAL)

    @property
    def on_trial(self) -> bool:
        """Whether it is asked to learn what it gains now."""
        return self.trial > 0 and self.wait > WAITS[0]

    def add(self, net: float | None, rows: int) -> None:
        """Take note of a step in a batch of rows, and of what the draft gained in it; None: that is not known."""
        if self.idle:
            self.idle -= 1
            return
        if net is None:
            return
        self.net.add(net)
        self.squares.add(net * net)
        self.trial = max(0, self.trial - 1)
        chance = max(0.0, self.squares.value - self.net.value**2) / self.net.weight
        if self.trial:
            return
        if self.net.value + sqrt(chance) >= 0:
            self.wait = WAITS[0]
        else:
            self.idle, self.wait = self.wait, min(2 * self.wait, WAITS[1] * rows)
            self._try(TRIAL)

    def _try(self, steps: int) -> None:
        self.net, self.squares, self.trial = Average(), Average(), steps


class Acceptance:
    """How often drafted tokens are accepted, under one way of choosing tokens: greedy, or coupled to the noise.

    Attributes:
        edges: by proposers (a bit mask) and depth, accepted tokens over the sum of their draft probabilities.
        families: by draft and depth of the parent, how often one of an accepted node's children was accepted.
    """

    def __init__(self) -> None:
        self.edges: defaultdict[tuple[int, int], Rate] = defaultdict(Rate)
        self.families: defaultdict[tuple[int, int], Rate] = defaultdict(partial(Rate, 0.5))

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
