"""A bar over work in a terminal; elsewhere, such as in a file, a line now and then.

Knows: tqdm, clocks, how many tokens were decoded.  Does not know: what the work is.
"""

import sys
from typing import Any

from tqdm import tqdm

from specinfer.common.progress import decoded

FIRST, EVERY = 10, 30  # seconds before the first line, and from one line to the next
LINE = "{desc}: {n_fmt} of {total_fmt} after {elapsed}{postfix}"


class Bar(tqdm):
    """A bar that also shows the tokens decoded since it began.

    Args:
        work: what is worked through; None where `update` is called.
        unit: of the work, in the singular.
        **options: of tqdm.
    """

    def __init__(self, work: Any, unit: str, **options: Any) -> None:
        self.watched, self.due, self.before = sys.stderr.isatty(), FIRST, decoded.tokens
        if not self.watched:  # every update looks at the clock
            options = {"desc": f"{unit}s", "bar_format": LINE, "mininterval": 0, **options}
        super().__init__(work, unit=unit, miniters=1, gui=not self.watched, **options)
        if not self.watched:
            self._instances.discard(self)  # it takes no line of a terminal

    @property
    def format_dict(self) -> dict[str, Any]:
        """What is drawn, the tokens included."""
        known: dict[str, Any] = super().format_dict
        if tokens := decoded.tokens - self.before:
            speed = f"{tokens} tokens, {tokens / max(known['elapsed'], 0.1):.1f} tokens/s"
            known["postfix"] = ", ".join(filter(None, [known["postfix"], speed]))
        return known

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draw the bar, or print a line if it is due."""
        if self.watched:
            return super().display(msg, pos)
        elapsed = self.format_dict["elapsed"]
        if elapsed >= self.due:
            self.due = elapsed + EVERY
            print(self, file=sys.stderr, flush=True)
        return True
