"""What adaptive trees learn: what steps cost, which drafted tokens the target accepts, which drafts pay.

    `Costs`        seconds: averages that forget, and a line over the size of a pass
    `Acceptance`   observed rates that correct the drafts' own probabilities
    `DraftRecord`  what a draft may still lose; with nothing left it is idle, and tried again when it may

Knows: figures, the trees of a batch, the tokens that rows emitted.
Does not know: clocks, models, what is decided by all this (`policy`).

A pass over the weights evicts everything else from the processor's caches.  After it, a Python loop over a few dozen
numbers is faster than array operations, so all rows' nodes are walked as one list.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import exp, inf, prod, sqrt

from specinfer.tree import Forest, Nodes

MEMORY = 24  # figures that an average looks back on, about
FAR = 1.5  # times what was expected, or that much less: the load of the machine has changed
RIDGE = 8.0  # squared tokens that sizes must differ by before a measured slope counts for half
FLAT = 1.15  # twice the tokens for at most this multiple of a pass's cost count as free
USUAL = 40  # tokens that cost as much as the rest of a step, about, on a CPU
DEPTHS = 3  # told apart: 1, 2, 3 and deeper
REMEMBERED = 200  # tokens that a rate looks back on, and steps that an allowance does, about
PRIORS = 0.5, 4.0  # tokens that it starts with: of drafted tokens, of accepted nodes with children
STAKE = 4.0, 1.0  # tokens that a draft may lose in its first trial, over the root of the rows, and in each later one
STAKED = 8.0  # tokens gained lately for each that it may lose as a text begins; each draft is credited with so many
CREDIT = 16.0  # tokens that it may lose, at most, of what it gained before
ALLOWANCE = 0.25  # tokens, times the root of the number of steps, that it may lose besides


class Average:
    """A running average that forgets.  It starts as the mean of what it is told.

    Args:
        memory: figures that it looks back on, about.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.value, self.count, self.memory = 0.0, 0, memory

    @property
    def weight(self) -> int:
        """How many figures it stands for."""
        return min(self.count, self.memory)

    def add(self, figure: float) -> None:
        """Take a figure into account."""
        self.count += 1
        self.value += (figure - self.value) / self.weight


class Seconds(Average):
    """An average of measured seconds: of two in a row, the smaller one counts, because interruptions only add.

    Where that is far from the average, the load of the machine has changed, and the average starts anew.  The first
    measurement counts until there is a second one: kernels are slow the first time.
    """

    last = inf

    def add(self, figure: float) -> None:
        """Take a measurement into account."""
        lesser, self.last = min(figure, self.last), figure
        if not self.value / FAR < lesser < self.value * FAR:
            self.count = 0
        elif self.count == 1:
            self.value = lesser
        super().add(lesser)


class Line:
    """Seconds as a line over a size, by least squares; the older a figure, the lighter it is.

    The line never falls.  Where sizes hardly differ it keeps its slope; at first, that of `USUAL` more tokens.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # of 1, n, n * n, seconds, n * seconds
        self.count, self.base, self.slope = 0, 0.0, 0.0
        self.last = 1.0  # measured seconds over those expected, the last time
        self.doubted = False  # whether the last pass of a much larger size was dearer than expected
        self.largest = 0.0  # size that was measured

    @property
    def known(self) -> bool:
        """Whether there were enough figures to draw a line."""
        return self.count >= 3

    def at(self, size: float) -> float:
        """Return the seconds that a size takes."""
        return self.base + self.slope * size

    def add(self, size: int, seconds: float) -> None:
        """Take a measurement into account.

        Cost grows with pass size; cost per token does not.  What is far outside of that is a change of the
        machine's speed, for all sizes; what is inside corrects the slope.
        """
        self.count += 1
        if self.known and (expected := self.at(size)):  # of two figures in a row, the smaller counts, as in `Seconds`
            earlier, self.last = self.last, seconds / expected
            ratio, share = min(earlier, self.last), size * self.sums[0] / self.sums[1]
            if share > FAR:  # much larger than usual
                doubted, self.doubted = self.doubted, self.last > FAR
                if self.doubted and not doubted:
                    return  # perhaps an interruption
                ratio = self.last
            seconds = ratio * expected
            if not min(1.0, share) / FAR < seconds * self.sums[0] / self.sums[3] < max(1.0, share) * FAR:
                self.sums[3:] = [ratio * old for old in self.sums[3:]]
                self.slope *= ratio
        self.largest = max(size, self.largest)
        fade = 1 - 1 / MEMORY
        figures = (1.0, size, size * size, seconds, size * seconds)
        self.sums = [fade * old + new for old, new in zip(self.sums, figures, strict=True)]
        total, n, nn, s, ns = self.sums
        before = self.slope or s / (USUAL * total + n)
        self.slope = max(0.0, (ns - n * s / total + RIDGE * before) / (nn - n * n / total + RIDGE))
        self.base = max(0.0, (s - self.slope * n) / total)


class Costs:
    """What steps cost on this machine, and what a second is worth.

    Attributes:
        plain: by rows, seconds of a step without drafted nodes.
        trees: seconds of a step with trees, drafts excluded, over the tokens that its pass is fed.
        levels: by draft, seconds of one level.
        depths: by draft, seconds of its proposals over their levels, of which the first one may cost most.
        earned: by rows, tokens that the last steps made in the seconds of a plain one, by this model.
    """

    def __init__(self) -> None:
        self.plain: dict[int, Seconds] = {}
        self.trees = Line()
        self.levels: dict[int, Seconds] = {}
        self.depths: dict[int, Line] = {}
        self.earned: dict[int, Average] = {}

    def seconds(self, rows: int, nodes: float) -> float:
        """Return what a step costs without its drafts, when the target scores this many nodes in each row."""
        plain = self.plain.get(rows)
        if self.trees.known and (nodes or plain is None):
            return self.trees.at(rows * (nodes + 1))
        return plain.value * (1 + rows * nodes / (USUAL + rows)) if plain else 0.0

    def price(self, rows: int) -> float:
        """Return the tokens that a second is worth to a batch; 0 if nothing was measured yet.

        It is the rate of plain decoding, or that of the last steps if that is larger.
        """
        plain = self.seconds(rows, 0)
        return max(rows, self.earned[rows].value if rows in self.earned else 0.0) / plain if plain else 0.0

    def node(self, rows: int) -> float:
        """Return the tokens that one more node must gain to pay for itself."""
        return self.price(rows) * self.trees.slope

    def flat(self, rows: int, nodes: int) -> bool:
        """Whether trees of this size were scored, cost little more than none, and twice as many nodes hardly more."""
        fed, trees, plain = rows * (nodes + 1), self.trees, self.plain.get(rows)
        if plain is None or not trees.known or fed > trees.largest or trees.at(fed) > FAR * plain.value:
            return False
        return trees.at(2 * fed) <= FLAT * trees.at(fed)

    def level(self, draft: int, rows: int) -> float | None:
        """Return the tokens that a draft's level must gain to pay for itself; None if that is not known."""
        price, level = self.price(rows), self.levels.get(draft)
        return price * level.value if price and level else None

    def further(self, draft: int, rows: int, depth: int) -> float | None:
        """Return the tokens that a level below this depth must gain to pay for itself; None if that is not known.

        It is not beyond twice the levels that were tried.
        """
        line = self.depths.get(draft)
        return self.price(rows) * line.slope if line and line.known and depth < 2 * line.largest else None

    def earn(self, rows: int, tokens: float, seconds: float) -> None:
        """Take into account what a step emitted, and what it cost by this model."""
        if plain := self.seconds(rows, 0):
            self.earned.setdefault(rows, Average(2 * MEMORY)).add(tokens * (plain / seconds))


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
        fade = 1 - 1 / REMEMBERED
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
        factors = [self.edge(draft, at) for at in range(1, min(depth, DEPTHS) + 1)]
        return prod(factors + factors[DEPTHS - 1 :] * (depth - DEPTHS))

    def family(self, draft: int, depth: int) -> float:
        """Return how often a child of an accepted node of a depth is accepted."""
        return min(1.0, self.families[draft, min(depth, DEPTHS - 1)].value)

    def expected(self, draft: int, depth: int) -> float:
        """Return how many nodes of a depth are accepted on average."""
        return prod(self.family(draft, above) for above in range(depth))


class DraftRecord:
    """Whether a draft is asked: while it has credit, so that no draft, however it behaves, loses more than is allowed.

    The allowance grows as the root of the number of steps, and steadily after `REMEMBERED` of them.  Trials are paid
    from it: the dearer they are, the longer is the wait.

    Args:
        credit: tokens that it may lose before it gained any.

    Attributes:
        credit: tokens that it may lose now: what it gained, less what its seconds are worth, and the allowance.
        idle: whether it waits, from when its credit is spent until there is enough for a trial.
        steps: so far, of this text and of those before it that it did not begin anew.
        lately: tokens that it gained in the last steps that asked it, less what they cost.
    """

    def __init__(self, credit: float) -> None:
        self.credit, self.idle, self.steps, self.lately = credit, False, 0, STAKED

    def begin(self) -> None:
        """Begin a text: with a stake if the draft gained lately, else as the last text ended."""
        if self.steps and self.lately >= 0:
            self.credit, self.idle, self.steps = min(max(self.lately / STAKED, STAKE[1]), STAKE[0]), False, 0

    def wait(self) -> None:
        """Be idle until there is credit for a trial, from nothing on."""
        self.credit, self.idle = min(self.credit, 0.0), True

    def add(self, net: float | None, reading: float = 0.0) -> None:
        """Take note of a step.

        Args:
            net: tokens that the draft gained in it; None if it was not asked, or that is not known.
            reading: tokens that its seconds are worth in which it read what it had missed.
        """
        reading = min(reading, CREDIT)
        if net is not None:
            self.lately += net - reading - self.lately / REMEMBERED
        self.credit -= reading if self.steps else 0.0  # with a text's prompt read, what follows is judged by itself
        self.steps += 1
        self.credit += (net or 0.0) + ALLOWANCE / (2 * sqrt(min(self.steps, REMEMBERED)))
        self.credit = min(self.credit, CREDIT)
        self.idle = self.credit < (STAKE[1] if self.idle else 0.0)
