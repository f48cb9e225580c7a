"""What adaptive trees learn about steps: averages that forget, costs by size, what some drafts would have done alone.

Knows: figures.  Does not know: trees, what drafts are worth (`habits`), what is chosen by it (`adapt`), clocks, models.
"""

from collections.abc import Iterator, Sequence
from math import inf
from threading import RLock

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
