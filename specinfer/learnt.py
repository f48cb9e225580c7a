"""What adaptive trees learn from steps: averages that forget, costs by size, chances of acceptance.

Knows: figures, trees, the tokens that rows emitted.  Does not know: what is chosen by it (`adapt`), clocks, models.

Everything here is a few dozen numbers, told and asked several times a step: plain Python is quicker than arrays.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from math import exp, expm1, inf, log, prod
from operator import or_
from threading import RLock

from specinfer.tree import TokenTree

MEMORY = 24  # steps that averages look back on, about
BUSY = 12  # steps over which it is seen how often trees were worth their costs
FAR = 1.25  # times what was expected, or so much less: another load, or an interruption


class Lock:
    """A lock that may be taken again by its thread; copied or pickled, it is a new one."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


class Average:
    """A running average that forgets; it starts as the mean of what it is told."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.value, self.count, self.memory = 0.0, 0, memory

    def add(self, figure: float) -> None:
        """Take a figure into account."""
        self.count += 1
        self.value += (figure - self.value) / min(self.count, self.memory)


class Hinge:
    """Seconds as a function of a size: flat up to a knee (memory bounds a pass), then linear (arithmetic does).

    The line is the least squares for every knee, the older the lighter; the knee that fits best counts.  The level is
    by how much everything is slower or faster than the line right now.  What interrupts a step only ever makes it
    slower, so it is the lesser of the last two: one fast step is believed at once, one slow step not before the next.
    The line learns from figures at their level, so it keeps its shape while others use the machine.

    Args:
        knees: sizes where the slope may begin.
        ridge: sizes count as if their variance were so much larger, so that equal ones make a flat line.
        memory: figures that the line looks back on, about.
    """

    def __init__(self, knees: Sequence[int] = (0,), ridge: float = 1.0, memory: int = 4 * MEMORY) -> None:
        self.ridge, self.fade = ridge, 1 / memory
        self.sums = {knee: [0.0] * 6 for knee in knees}  # of 1, n, n * n, seconds, n * seconds, seconds ** 2
        self.count = self.knee = 0
        self.base = self.slope = 0.0
        self.level = self.last = 1.0

    @property
    def known(self) -> bool:
        """Whether there were enough figures to draw a line."""
        return self.count >= 3

    def at(self, size: float) -> float:
        """Return the seconds that a size takes now."""
        return self.level * (self.base + self.slope * max(0.0, size - self.knee))

    def add(self, size: int, seconds: float, weight: float = 1.0) -> None:
        """Take a measurement into account, as so many; only those of weight 1 are counted."""
        if weight == 1:
            self.count += 1
            line = self.at(size) / self.level
            if self.count > 1 and line > 0:
                self.last, before = seconds / line, self.last
                low = min(self.last, before)
                self.level = 1.0 if 1 / FAR < low < FAR else low
                seconds = line * min(max(self.last / self.level, 1 / FAR), FAR)
        least = inf
        for knee, sums in self.sums.items():
            n = max(0, size - knee)  # beyond the knee
            figures = (1.0, n, n * n, seconds, n * seconds, seconds * seconds)
            fade = 1 - weight * self.fade
            sums[:] = [old * fade + weight * new for old, new in zip(sums, figures, strict=True)]
            error, slope, base = self._fit(*sums)
            if error < least:
                least, self.knee, self.slope, self.base = error, knee, slope, max(0.0, base)

    def _fit(self, total: float, n: float, nn: float, s: float, ns: float, ss: float) -> tuple[float, float, float]:
        """Return the squared error, slope and base of the line through figures with these sums."""
        spread, together = nn - n * n / total, ns - n * s / total
        slope = max(0.0, together / (spread + self.ridge * total))
        return ss - s * s / total - slope * (2 * together - slope * spread), slope, (s - slope * n) / total


class Calibration:
    """Observed acceptance of drafted tokens whose parent was accepted, by who proposed them, depth and probability.

    Within a bin of the logit, a probability is multiplied by accepted / expected, both counted with forgetting, and
    with `PRIOR` tokens accepted as often as expected.
    """

    PRIOR = 4.0
    FORGET = 0.995  # a step
    DEPTHS = 3  # 1, 2, 3 and deeper
    CENTRES = tuple(1 / (1 + exp(-logit)) for logit in range(-6, 7))  # of the bins, as probabilities

    def __init__(self) -> None:
        # by proposers, a bit mask, depth and bin: how many were expected to be accepted, and were, in units
        self.counts: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.unit = 1.0  # what one of now counts; it grows, so what is older counts for less
        self.masks: set[int] = set()  # of proposers seen

    def observe(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Take into account which drafted tokens the target's own would have accepted.

        Args:
            tree: all that was drafted, whether the target scored it or not.
            tokens: what the row emitted; every child along them was right or wrong.
        """
        proposers, scores = tree.proposers, tree.scores.tolist()
        self.masks.update(proposers)
        node = 0  # the children's parent
        for depth, family, right in walked(tree, tokens):
            for child in family:
                edge = scores[child] - scores[node]
                place = proposers[child], min(depth + 1, self.DEPTHS), _bin(edge)
                expected, accepted = self.counts.get(place, (0.0, 0.0))
                self.counts[place] = expected + self.unit * exp(edge), accepted + self.unit * (child == right)
            node = right or 0

    def forget(self) -> None:
        """Let everything observed so far weigh a little less."""
        self.unit /= self.FORGET
        if self.unit > 1e100:
            self.counts = {place: (e / self.unit, a / self.unit) for place, (e, a) in self.counts.items()}
            self.unit = 1.0

    def path(self, tree: TokenTree) -> list[float]:
        """Return for each node of a merged tree the probability that its path is accepted; 1 at the root."""
        scores, columns = tree.scores.tolist(), zip(tree.parents.tolist(), tree.depths.tolist(), strict=True)
        reached = [1.0]
        for node, ((parent, depth), mask) in enumerate(zip(columns, tree.proposers, strict=True)):
            if node:
                edge = scores[node] - scores[parent]
                counts = self.counts.get((mask, min(depth, self.DEPTHS), _bin(edge)), (0.0, 0.0))
                reached.append(reached[parent] * self._corrected(edge, counts))
        return reached

    def edge(self, draft: int, depth: int, log_prob: float) -> float:
        """Return the probability that a token of one draft is accepted, whether others propose it or not.

        Args:
            draft: its id.
            depth: of the token, 1 or more.
            log_prob: the draft's.
        """
        place = min(depth, self.DEPTHS), _bin(log_prob)
        found = [self.counts.get((mask, *place), (0.0, 0.0)) for mask in self.masks if mask >> draft & 1]
        return self._corrected(log_prob, (sum(e for e, _ in found), sum(a for _, a in found)))

    def _corrected(self, log_prob: float, counts: tuple[float, float]) -> float:
        """Return a draft's probability as what was expected of its like, and accepted, makes it."""
        prior = self.PRIOR * self.CENTRES[_bin(log_prob)] * self.unit
        return min(1.0, exp(log_prob) * (counts[1] + prior) / (counts[0] + prior))


def _bin(log_prob: float) -> int:
    """Return the place of a probability among `Calibration.CENTRES`."""
    log_prob = min(max(-50.0, log_prob), -1e-9)  # of NaN -50: it is refused where trees are made
    return min(max(round(log_prob - log(-expm1(log_prob))), -6), 6) + 6


class Ranks:
    """How often the k-th child of an accepted node was accepted, by the node's depth; averages that forget.

    A depth that was hardly seen is taken to be like the one above.
    """

    WIDTH = 8  # ranks told apart
    DEPTHS = 3  # the root, 1, 2 and deeper
    MEMORY = 4 * MEMORY
    PRIOR = 4  # families that the rates to begin with count as
    SEEN = 12  # families, those included, from which on a depth speaks for itself

    def __init__(self) -> None:
        self.rates = [[0.25 * 0.5**rank for rank in range(self.WIDTH)] for _ in range(self.DEPTHS)]
        self.counts = [self.PRIOR] * self.DEPTHS

    def observe(self, depth: int, rank: int | None) -> None:
        """Take a family into account whose parent, of that depth, was accepted: which child was, None for none."""
        place = min(depth, self.DEPTHS - 1)
        self.counts[place] = min(self.counts[place] + 1, self.MEMORY)
        share, rates = 1 / self.counts[place], self.rates[place]
        rates[:] = [rate + share * ((turn == rank) - rate) for turn, rate in enumerate(rates)]
        for below in self.rates[place + 1 :]:  # what is not asked about any more: little by little
            below[:] = [low + (rate - low) / (4 * self.MEMORY) for low, rate in zip(below, rates, strict=True)]

    def at(self, depth: int) -> list[float]:
        """Return how often the children of an accepted node of a depth are accepted, by rank."""
        place = min(depth, self.DEPTHS - 1)
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
        return sum(accepted * rate - price for rate in self.at(depth) if accepted * rate > price)


def walked(tree: TokenTree, tokens: Sequence[int]) -> Iterator[tuple[int, list[int], int | None]]:
    """Follow emitted tokens through a tree: yield depth and children of each node, and which child was right."""
    node: int | None = 0
    for depth, token in enumerate(tokens):
        if node is None:
            return
        right = tree.child(node, token)
        yield depth, tree.children(node), right
        node = right


def subsets(drafts: int) -> Iterator[int]:
    """Yield every subset of a set of drafts, itself first and none last; all are bit masks."""
    some = drafts
    while some:
        yield some
        some = (some - 1) & drafts
    yield 0


class Coalition:
    """What some of the drafts asked would have done without the others: averages over the steps that asked those."""

    def __init__(self) -> None:
        self.tokens, self.nodes = Average(), Average()  # of the steps in which it had nodes scored
        self.busy = Average(BUSY)  # how often that was: costs decide it, and they change

    def add(self, tokens: float, nodes: int) -> None:
        """Take a step into account: accepted tokens a row, and nodes the target scored."""
        self.busy.add(nodes > 0)
        if nodes:
            self.tokens.add(tokens)
            self.nodes.add(nodes)


class Habits:
    """What was learnt about drafts under one way of choosing tokens: greedy, or coupled to the noise."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.ranks: defaultdict[int, Ranks] = defaultdict(Ranks)  # by draft

    def observe(self, trees: Sequence[TokenTree], tokens: Sequence[Sequence[int]]) -> None:
        """Compare what was drafted with what each row emitted."""
        self.calibration.forget()
        for tree, emitted in zip(trees, tokens, strict=True):
            self.calibration.observe(tree, emitted)
            proposers = tree.proposers
            for depth, children, right in walked(tree, emitted):
                tried = reduce(or_, (proposers[child] for child in children), 0)
                chosen = dict(tree.draws[right]) if right else {}  # rank by draft
                for draft in range(tried.bit_length()):
                    if tried >> draft & 1:
                        self.ranks[draft].observe(depth, chosen.get(draft))
