"""What steps cost: averages that forget, and seconds as a line over the size of a pass.

Knows: figures.  Does not know: trees, clocks, models, what is decided by costs (`policy`).
"""

from math import inf

MEMORY = 24  # figures that an average looks back on, about
FAR = 1.5  # times what was expected, or that much less: the load of the machine has changed
RIDGE = 8.0  # squared tokens that sizes must differ by before a measured slope counts for half
FLAT = 1.15  # twice the tokens for at most this multiple of a pass's cost count as free
USUAL = 40  # tokens that cost as much as the rest of a step, about, on a CPU


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
    """An average of measured seconds: of two in a row, the lesser counts, because interruptions only add.

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

        A larger pass costs no less, and a token of it no more.  What is far outside of that is a change of the
        machine's speed, for all sizes; what is inside corrects the slope.
        """
        self.count += 1
        if self.known and (expected := self.at(size)):  # of two figures in a row, the lesser counts, as in `Seconds`
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
        earned: by rows, tokens that the last steps made in the seconds of a plain one, by this model.
    """

    def __init__(self) -> None:
        self.plain: dict[int, Seconds] = {}
        self.trees = Line()
        self.levels: dict[int, Seconds] = {}
        self.earned: dict[int, Average] = {}

    def seconds(self, rows: int, nodes: float) -> float:
        """Return what a step costs without its drafts, when the target scores so many nodes in each row."""
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
        """Whether trees of so many nodes were scored, cost little more than none, and twice as many hardly more."""
        fed, trees, plain = rows * (nodes + 1), self.trees, self.plain.get(rows)
        if plain is None or not trees.known or fed > trees.largest or trees.at(fed) > FAR * plain.value:
            return False
        return trees.at(2 * fed) <= FLAT * trees.at(fed)

    def level(self, draft: int, rows: int) -> float | None:
        """Return the tokens that a draft's level must gain to pay for itself; None if that is not known."""
        price, level = self.price(rows), self.levels.get(draft)
        return price * level.value if price and level else None

    def earn(self, rows: int, tokens: float, seconds: float) -> None:
        """Take into account what a step emitted, and what it cost by this model."""
        if plain := self.seconds(rows, 0):
            self.earned.setdefault(rows, Average(2 * MEMORY)).add(tokens * plain / seconds)
