"""Whether a draft pays, by what it gained in the steps that asked it; if not, it is idle, and tried again.

Knows: figures.  Does not know: how gains and costs are found (`policy`).
"""

from math import sqrt

from specinfer.adaptive.cost_model import Average

TRIAL = 2  # steps in which an idle draft is tried; twice as many at first
WAITS = 8, 64  # idle steps after the first trial that failed, and, by rows, at most


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
        self.net, self.squares, self.trial = Average(), Average(), 2 * TRIAL
        self.wait, self.idle = WAITS[0], 0

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
            self.net, self.squares, self.trial = Average(), Average(), TRIAL
