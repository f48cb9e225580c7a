"""Adaptive trees: as many drafts, levels and nodes a step as pay on this machine, for these models and this text.

Knows: what steps cost in seconds, by size; which drafted tokens were accepted.
Does not know: clocks (seconds are told), models, verification, text.

Everything is weighed by one price: the tokens that a second is worth, at the rate of the last steps or of plain
decoding, whichever is more.  Taking whatever gains more tokens than its seconds are worth maximises tokens per second
(Dinkelbach, 1967).  Expected tokens are drafted probabilities, corrected by how often such were accepted.

    `Auto.grow`      is this draft asked in this step at all, and about one more level?
    `Auto.fit`       how many nodes of the merged tree does the target score?  None: the step is plain
    `Auto.observe`   the step's outcome and seconds; what was learnt holds for later runs, too

Trees depend on time, token ids do not: trees are ranked, and the walk is exact for every tree.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from math import inf, isinf, prod
from operator import or_
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.results import reach
from specinfer.tree import BestFirst, Frontier, Growth, Kind, Source, TokenTree, grow_best_first

MAX_NODES, MAX_DEPTH = 24, 8
SIZES = (16, 16, 0, 24, 4)  # nodes of the first steps, by which costs become known; the first one is not timed
EXPLORE = 12  # steps after which sizes are chosen, even if trees were never that large
KNEES = 0, 4, 8, 16  # tokens fed up to which a pass may cost what one token costs
MEMORY = 24  # steps that averages look back on, about
PLAIN_AGAIN = 128  # steps after which a plain one is due: its cost drifts, too
MARGIN = 1.03  # drafting must promise to be so much faster than not drafting: averages err
TRIAL = 2  # steps for which an idle draft is tried again ...
WAITS = 8, 64  # ... after so many idle ones at first, doubled with every failure, and so many at most
LEVEL_PRICE = 0.1  # tokens that a level must gain while its cost is unknown
NODE_SHARE = 1 / 32  # of a level's cost, is what it costs to ask about one node more
USUAL = 8  # nodes of a usual tree
LEAST = 0.001, 0.05  # bounds of the path probability below which nothing is drafted

Floats = NDArray[np.float64]


class Average:
    """A running average that forgets; it starts as the mean of what it is told.

    Args:
        value, count: what it was told before, so to speak.
        most: a figure larger than so many averages is an interruption, and counts as that many.
    """

    def __init__(self, value: float = 0.0, count: int = 0, most: float = inf) -> None:
        self.value, self.count, self.most = value, count, most

    def add(self, figure: float) -> None:
        """Take a figure into account."""
        if self.count and not isinf(self.most):
            figure = min(figure, self.most * self.value)
        self.count += 1
        self.value += (figure - self.value) / min(self.count, MEMORY)


class Hinge:
    """Seconds as a function of a size: flat up to a knee (memory bounds a pass), then linear (arithmetic does).

    Least squares for every knee, the older the lighter, interruptions clipped; the knee that fits best counts.

    Args:
        knees: sizes where the slope may begin.
        ridge: sizes count as if their variance were so much larger, so that equal ones make a flat line.
    """

    def __init__(self, knees: Sequence[int] = (0,), ridge: float = 1.0) -> None:
        self.knees, self.ridge = np.array(knees, float), ridge
        self.sums = np.zeros((6, len(knees)))  # of 1, n, n * n, seconds, n * seconds, seconds ** 2; n beyond the knee
        self.count = 0
        self.knee = self.base = self.slope = 0.0

    @property
    def known(self) -> bool:
        """Whether there were enough figures to draw a line."""
        return self.count >= 3

    def at(self, size: float) -> float:
        """Return the seconds that a size takes."""
        return self.base + self.slope * max(0.0, size - self.knee)

    def add(self, size: int, seconds: float, weight: float = 1.0) -> None:
        """Take a measurement into account, as so many."""
        if self.known:
            seconds = min(seconds, 2 * self.at(size))
        beyond, one = (size - self.knees).clip(0), np.ones(len(self.knees))
        figures = np.array([one, beyond, beyond * beyond, seconds * one, seconds * beyond, seconds * seconds * one])
        self.sums = self.sums * (1 - weight / (4 * MEMORY)) + weight * figures
        self.count += weight == 1
        total, n, nn, s, ns, ss = self.sums
        spread, together = nn - n * n / total, ns - n * s / total
        slopes = (together / (spread + self.ridge * total)).clip(0)
        errors = ss - s * s / total - slopes * (2 * together - slopes * spread)
        best = int(errors.argmin())
        self.knee, self.slope = float(self.knees[best]), float(slopes[best])
        self.base = max(0.0, float((s - slopes * n)[best] / total[best]))


class Calibration:
    """Observed acceptance of drafted tokens whose parent was accepted, by who proposed them, depth and probability.

    Within a bin of the logit, a probability is multiplied by accepted / expected, both counted with forgetting, and
    with `PRIOR` tokens accepted as often as expected.
    """

    PRIOR = 4.0
    FORGET = 0.995  # a step
    DEPTHS = 3  # 1, 2, 3 and deeper
    CENTRES: ClassVar[Floats] = 1 / (1 + np.exp(-np.arange(-6.0, 7.0)))  # of the bins, as probabilities
    SHAPE = 2, DEPTHS, 13  # expected and accepted, depths, bins

    def __init__(self) -> None:
        self.counts: defaultdict[int, Floats] = defaultdict(lambda: np.zeros(self.SHAPE))  # by proposers, a bit mask

    def observe(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Take into account which drafted tokens the target's own would have accepted.

        Args:
            tree: all that was drafted, whether the target scored it or not.
            tokens: what the row emitted; every child along them was right or wrong.
        """
        seen = [(child, child == right) for _, family, right in walked(tree, tokens) for child in family]
        if seen:
            children, proposers = [child for child, _ in seen], tree.proposers()
            edges = tree.scores[children] - tree.scores[tree.parents[children]]
            places = zip(self._depths(tree.depths[children]), self._bins(edges), np.exp(edges), strict=True)
            for (child, accepted), (depth, place, q) in zip(seen, places, strict=True):
                self.counts[proposers[child]][:, depth, place] += q, accepted

    def forget(self) -> None:
        """Let everything observed so far weigh a little less."""
        for counts in self.counts.values():
            counts *= self.FORGET

    def path(self, tree: TokenTree) -> list[float]:
        """Return for each node of a merged tree the probability that its path is accepted; 1 at the root."""
        edges = np.append(0.0, tree.scores[1:] - tree.scores[tree.parents[1:]])
        places = zip(self._depths(tree.depths).tolist(), self._bins(edges).tolist(), strict=True)
        proposers = tree.proposers()
        factors = {mask: self._factors(self.counts[mask]) for mask in set(proposers)}
        columns = zip(np.exp(edges).tolist(), places, proposers, tree.parents.tolist(), strict=True)
        accepted: list[float] = []
        for q, place, mask, parent in columns:
            accepted.append(accepted[parent] * min(1.0, q * float(factors[mask][place])) if mask else 1.0)
        return accepted

    def edges(self, draft: int, depth: int, edges: Floats) -> Floats:
        """Return the probabilities that tokens of one draft are accepted, whether others propose them or not.

        Args:
            draft: its id.
            depth: of the tokens, 1 or more.
            edges: the draft's log-probabilities, of any shape.
        """
        counts = sum((own for mask, own in self.counts.items() if mask >> draft & 1), np.zeros(self.SHAPE))
        factors = self._factors(counts)[min(depth, self.DEPTHS) - 1]
        return np.minimum(1.0, np.exp(edges) * factors[self._bins(edges)])

    def _factors(self, counts: Floats) -> Floats:
        prior = self.PRIOR * self.CENTRES
        return (counts[1] + prior) / (counts[0] + prior)

    def _depths(self, depths: NDArray[np.int64]) -> NDArray[np.int64]:
        return depths.clip(1, self.DEPTHS) - 1

    def _bins(self, log_probs: Floats) -> NDArray[np.int64]:
        log_probs = log_probs.clip(-50.0, -1e-9)
        logits = log_probs - np.log(-np.expm1(log_probs))
        return np.rint(logits).clip(-6, 6).astype(np.int64) + 6


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
        self.tokens, self.nodes, self.busy = Average(), Average(), Average()

    def add(self, tokens: float, nodes: int) -> None:
        """Take a step into account: accepted tokens a row, and nodes the target scored."""
        self.tokens.add(tokens)
        self.busy.add(nodes > 0)
        if nodes:
            self.nodes.add(nodes)


class Habits:
    """What was learnt about drafts under one way of choosing tokens: greedy, or coupled to the noise."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        # by the drafts asked, and some of them, both bit masks
        self.coalitions: defaultdict[tuple[int, int], Coalition] = defaultdict(Coalition)
        self.ranks: defaultdict[int, Ranks] = defaultdict(Ranks)  # by draft

    def observe(self, trees: Sequence[TokenTree], tokens: Sequence[Sequence[int]]) -> None:
        """Compare what was drafted with what each row emitted."""
        self.calibration.forget()
        for tree, emitted in zip(trees, tokens, strict=True):
            self.calibration.observe(tree, emitted)
            proposers = tree.proposers()
            for depth, children, right in walked(tree, emitted):
                tried = reduce(or_, (proposers[child] for child in children), 0)
                chosen = dict(tree.draws[right]) if right else {}  # rank by draft
                for draft in range(tried.bit_length()):
                    if tried >> draft & 1:
                        self.ranks[draft].observe(depth, chosen.get(draft))


class Ranks:
    """How often the k-th child of an accepted node was accepted, by the node's depth; averages that forget.

    Before anything is known, each child takes half of what the ones before it left, up to half.
    """

    WIDTH = 8  # ranks told apart
    DEPTHS = 3  # the root, 1, 2 and deeper
    MEMORY = 4 * MEMORY

    def __init__(self) -> None:
        self.rates = np.tile(0.25 * 0.5 ** np.arange(self.WIDTH), (self.DEPTHS, 1))
        self.counts = [2] * self.DEPTHS

    def observe(self, depth: int, rank: int | None) -> None:
        """Take a family into account whose parent, of that depth, was accepted: which child was, None for none."""
        place = min(depth, self.DEPTHS - 1)
        self.counts[place] = min(self.counts[place] + 1, self.MEMORY)
        self.rates[place] *= 1 - 1 / self.counts[place]
        if rank is not None and rank < self.WIDTH:
            self.rates[place, rank] += 1 / self.counts[place]
        # depths that are never asked about are taken to be like the one above, little by little
        self.rates[place + 1 :] += (self.rates[place] - self.rates[place + 1 :]) / (4 * self.MEMORY)

    def expected(self, depth: int) -> float:
        """Return how many nodes of a depth are accepted on average."""
        hits = self.rates.sum(1).tolist()
        return prod(hits[min(place, self.DEPTHS - 1)] for place in range(depth))

    def surplus(self, depth: int, accepted: Floats, price: float) -> Floats:
        """Return the tokens that the children of each node are expected to gain beyond what they cost.

        Args:
            depth: of the nodes.
            accepted: their probabilities of acceptance, of any shape.
            price: tokens that a child must gain to pay for itself.
        """
        gains: Floats = (np.multiply.outer(accepted, self.rates[min(depth, self.DEPTHS - 1)]) - price).clip(0).sum(-1)
        return gains


class Pace:
    """What batches of one size cost, and how fast they were."""

    def __init__(self) -> None:
        self.plain = Average(most=1.5)  # seconds of a step that drafted nothing
        self.since_plain = 0  # steps
        self.tokens = self.seconds = 0.0  # of the last steps


class Auto:
    """Best-first trees whose drafts, levels and nodes are chosen step by step to maximise tokens per second.

    One object serves one decoder: it learns what that one's target and drafts cost, and are worth.

    Args:
        max_nodes: nodes of a merged tree at most.
        max_depth: levels below the root at most.

    Raises:
        PolicyError: a size that is not a whole number, or negative.
    """

    kind: ClassVar[Kind] = Kind.RANKED

    def __init__(self, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH) -> None:
        bounds = BestFirst(max_nodes, max_depth)  # which checks them
        self.max_nodes, self.max_depth = bounds.max_nodes, bounds.max_depth
        self.steps = self.explored = 0  # steps observed; sizes of `SIZES` tried
        self.line = Hinge(KNEES)  # seconds of a step over its tokens fed, drafts excluded
        self.paces: defaultdict[int, Pace] = defaultdict(Pace)  # by rows
        self.asking: defaultdict[int, Average] = defaultdict(lambda: Average(most=2.0))  # seconds a step, by draft
        self.asking_levels: defaultdict[int, Hinge] = defaultdict(lambda: Hinge(ridge=1e-3))  # ... over levels
        self.waits: list[int] = []  # by draft, steps that it will be idle next time
        self.due: list[int] = []  # by draft, the step from which it is tried again
        self.learnt: defaultdict[bool, Habits] = defaultdict(Habits)
        self.start(drafts=0, coupled=False)

    def __repr__(self) -> str:
        return f"Auto(max_nodes={self.max_nodes}, max_depth={self.max_depth})"

    def start(self, drafts: int, coupled: bool) -> None:
        """Begin a text: every draft gets a trial, however idle it was, for texts differ.

        Args:
            drafts: how many there are.
            coupled: whether drafts rank by the target's noise.
        """
        self.waits, self.due = [WAITS[0]] * drafts, [self.steps] * drafts
        self.habits = self.learnt[coupled]
        self.asked = -1  # the drafts to ask in the next step, a bit mask: all
        self.working = (1 << drafts) - 1  # those that paid when they were judged last
        self.warm = 0  # those asked in the step before: the others have to read what they missed first
        self.levels: defaultdict[int, int] = defaultdict(int)  # asked for in this step, by draft
        self.grown: Sequence[TokenTree] = ()  # this step's, before `fit`

    # ---- choices ----

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row: none if the draft is idle, else level by level while that pays."""
        depth = self.max_depth if max_depth is None else min(max_depth, self.max_depth)
        if not self.asked >> source.draft & 1:
            depth = 0
        self.levels[source.draft] = min(depth, 1)
        least = float(np.clip(self._node_price(source.batch) / 2, *LEAST))  # half of a node's price, for q may be low
        return grow_best_first(source, self.max_nodes, depth, least, _Levels(self, source))

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return each tree's nodes that are worth their part of the target's pass; as many in all rows, or none."""
        self.grown = trees
        paths = [self.habits.calibration.path(tree) for tree in trees]
        size = self._size(paths)
        return [tree.best(size, np.array(path)) for tree, path in zip(trees, paths, strict=True)]

    def another_level(self, draft: int, depth: int, accepted: Floats) -> int:
        """Return about how many nodes of each row a draft is asked: none unless they gain more than the level costs.

        Args:
            draft, depth: which, and of which nodes.
            accepted: probabilities (rows, nodes) that the target accepts those nodes, the likelier first.
        """
        rows = len(accepted)
        levels, price = self.asking_levels[draft], self._price(rows)
        cost = levels.slope * price if levels.known and price else LEVEL_PRICE * rows
        gains = self.habits.ranks[draft].surplus(depth, accepted, self._node_price(rows))
        if gains.sum() <= cost:
            return 0
        return 1 + int((gains > NODE_SHARE * cost).any(0).nonzero()[0].max(initial=0))

    def _size(self, paths: Sequence[Sequence[float]]) -> int:
        """Return how many nodes the target scores in each row, from each row's probabilities of acceptance."""
        rows, most = len(paths), min(self.max_nodes, max(map(len, paths)) - 1)
        if self._exploring and (most or not SIZES[self.explored]):
            self.explored += 1
            return min(SIZES[self.explored - 1], most)
        price = self._price(rows)
        if price is None:
            return min(SIZES[0], most)
        gains = np.zeros((rows, most + 1))
        for row, path in zip(gains, paths, strict=True):
            best = sorted(path[1:], reverse=True)[:most]
            row[1 : len(best) + 1] = best
        seconds = [self._seconds(rows, nodes) for nodes in range(most + 1)]
        return int((gains.sum(0).cumsum() - price * np.array(seconds)).argmax())

    def _choose(self, asked: int, rows: int) -> int:
        """Return the drafts to ask in the next step, after a step that asked some; both are bit masks."""
        everyone = (1 << len(self.due)) - 1
        if self._exploring:
            return everyone if SIZES[self.explored] else 0
        if asked:
            few = self.habits.coalitions[asked, asked].tokens.count < 2 * TRIAL
            self.working = asked if few else max(subsets(asked), key=lambda drafts: self._rate(asked, drafts, rows))
        trials = 0
        for draft, due in enumerate(self.due):
            if self.working >> draft & 1:
                self.waits[draft], self.due[draft] = WAITS[0], self.steps
            elif self.steps >= due + TRIAL:
                self.due[draft] = self.steps + self.waits[draft]
                self.waits[draft] = min(2 * self.waits[draft], WAITS[1])
            elif self.steps >= due:
                trials |= 1 << draft
        return 0 if self.paces[rows].since_plain >= PLAIN_AGAIN else self.working | trials

    # ---- costs, and what they buy ----

    @property
    def _exploring(self) -> bool:
        return self.explored < len(SIZES) and self.steps < EXPLORE

    def _price(self, rows: int) -> float | None:
        """Return the tokens that a second is worth to a batch; None before it is known."""
        pace = self.paces[rows]
        if not pace.plain.count and not self.line.known:
            return None
        return max(rows / max(self._seconds(rows, 0), 1e-9), pace.tokens / pace.seconds if pace.seconds else 0.0)

    def _seconds(self, rows: int, nodes: float) -> float:
        """Return what a step costs without its drafts, when the target scores so many nodes in each row."""
        plain = self.paces[rows].plain
        if self.line.known and (nodes or not plain.count):
            return self.line.at(rows * (nodes + 1))
        return plain.value * (1 + rows * nodes / 20)  # of CPUs and GPUs bound by memory, until it is measured

    def _rate(self, asked: int, drafts: int, rows: int) -> float:
        """Return the tokens per second that some of the drafts asked are expected to make."""
        coalition, plain = self.habits.coalitions[asked, drafts], self._seconds(rows, 0)
        seconds = plain + coalition.busy.value * (self._seconds(rows, coalition.nodes.value) - plain)
        seconds += sum(own.value for draft, own in self.asking.items() if drafts >> draft & 1)
        seconds *= MARGIN if drafts else 1
        return rows * (1 + coalition.tokens.value) / max(seconds, 1e-9)

    def _node_price(self, rows: int) -> float:
        """Return the tokens that a node must gain to pay for itself in a tree of usual size; 0 before it is known."""
        seconds = self.line.at(rows * (1 + USUAL)) - self.line.at(rows)
        return (self._price(rows) or 0.0) * seconds / (rows * USUAL)

    # ---- what is learnt ----

    def observe(
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        proposing: Sequence[float],
        seconds: float,
    ) -> None:
        """Learn from a step.

        Args:
            trees: what the target scored, one per row.
            paths: accepted nodes, root excluded.
            tokens: what each row emitted.
            proposing: seconds of each draft; 0 where none was asked.
            seconds: of the whole step, drafts included.
        """
        self.steps += 1
        rows, nodes = len(trees), max(tree.num_drafted for tree in trees)
        if self.steps > 1:  # the first step warms the machine up
            self._time(rows, nodes, sum(map(len, tokens)), proposing, seconds)
        self.habits.observe(self.grown, tokens)
        asked = sum(1 << draft for draft, spent in enumerate(proposing) if spent and self.asked >> draft & 1)
        if not self._exploring:
            self._credit(trees, paths, asked)
        self.levels.clear()
        self.grown = ()
        self.warm = asked
        self.asked = self._choose(asked, rows)

    def _time(self, rows: int, nodes: int, tokens: int, proposing: Sequence[float], seconds: float) -> None:
        pace = self.paces[rows]
        fade = 1 - 1 / (2 * MEMORY)
        pace.tokens, pace.seconds = pace.tokens * fade + tokens, pace.seconds * fade + seconds
        pace.since_plain = pace.since_plain + 1 if nodes else 0
        rest = seconds - sum(proposing)
        if nodes:
            self.line.add(rows * (nodes + 1), rest)
        else:
            pace.plain.add(rest)
        for draft, spent in enumerate(proposing):
            if spent and self.asked & self.warm >> draft & 1:
                self.asking[draft].add(spent)
                self.asking_levels[draft].add(self.levels[draft], spent)
                self.asking_levels[draft].add(0, 0.0, weight=0.1)  # so that equal ones make a line through nothing

    def _credit(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], asked: int) -> None:
        """Credit every coalition of the drafts that were asked with what it would have done alone."""
        rows = [(tree.proposers(), path) for tree, path in zip(trees, paths, strict=True)]
        for drafts in subsets(asked):
            tokens = [reach((proposers[node] for node in path), drafts) for proposers, path in rows]
            nodes = max(sum(1 for mask in proposers if mask & drafts) for proposers, _ in rows)
            self.habits.coalitions[asked, drafts].add(sum(tokens) / len(rows), nodes)

    def reasons(self, names: Sequence[str], rows: int) -> str:
        """Return what choices rest on, in words; names are the drafts'."""
        parts = []
        if plain := self._seconds(rows, 0):
            parts.append(f"a plain step costs {1e3 * plain:.1f} ms")
        if self.line.known:
            few, many = (1e3 * self.line.at(rows * (1 + nodes)) for nodes in (USUAL / 2, 2 * USUAL))
            parts.append(f"one with trees {few:.1f} ms ({USUAL // 2} nodes) to {many:.1f} ms ({2 * USUAL} nodes)")
        for draft, name in enumerate(names):
            levels = self.asking_levels[draft]
            parts.append(f"a level of {name} {1e3 * levels.at(1):.1f} ms, each further one {1e3 * levels.slope:.1f} ms")
        parts += [f"{name} is idle" for draft, name in enumerate(names) if not self.asked >> draft & 1]
        return ", ".join(parts)


class _Levels:
    """How many nodes of its next level one draft is asked about, from the calibrated probabilities of the nodes there.

    Where tensors are not on the host it goes by averages instead: to look at the nodes would be to wait for them.
    """

    def __init__(self, auto: Auto, source: Source) -> None:
        self.auto, self.draft, self.rows = auto, source.draft, source.batch
        self.scores = np.zeros((source.batch, 1))  # of all nodes asked about so far
        self.accepted = np.ones((source.batch, 1))  # their probabilities of acceptance

    def __call__(self, frontier: Frontier, scores: Tensor) -> int:
        auto, width = self.auto, frontier.tokens.shape[1]
        if frontier.tokens.device.type == "cpu":
            own, accepted = self._accepted(frontier, scores)
            width = auto.another_level(self.draft, frontier.depth, accepted)
            self.scores = np.append(self.scores, own[:, :width], 1)
            self.accepted = np.append(self.accepted, accepted[:, :width], 1)
        else:
            average = np.full((self.rows, 1), auto.habits.ranks[self.draft].expected(frontier.depth))
            width *= auto.another_level(self.draft, frontier.depth, average)
        auto.levels[self.draft] += width > 0
        return width

    def _accepted(self, frontier: Frontier, scores: Tensor) -> tuple[Floats, Floats]:
        """Return scores and the probabilities that the nodes are accepted, both (B, W); padding has hardly any."""
        valid, parents, own = frontier.valid.numpy(), frontier.parents.numpy(), scores.numpy().astype(np.float64)
        own = np.where(valid, own, -50.0)
        edges = own - np.take_along_axis(self.scores, parents, 1)
        accepted = self.auto.habits.calibration.edges(self.draft, frontier.depth, edges) * valid
        return own, accepted * np.take_along_axis(self.accepted, parents, 1)
