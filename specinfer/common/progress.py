"""Progress of work on standard error: a bar in a terminal; elsewhere, in a file for example, a line now and then.

Knows: rich, clocks, that of several processes the first speaks.  Does not know: what the work is.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import ProgressColumn

Figures: TypeAlias = dict[str, Any]  # by name: "tokens", for example
Progress: TypeAlias = Callable[[str, int, int, Figures], None]  # (stage, number done, of all, figures)
Work = TypeVar("Work")

FIRST, EVERY = 10, 30  # seconds before the first line, and from one line to the next
_ends: list[Callable[[], object]] = []  # what takes the display off the terminal, or keeps a line back: one at most


class Bars:
    """A `Progress` function that shows one stage at a time; tokens are also shown per second of the stage."""

    def __init__(self) -> None:
        self.stage = ""

    def __call__(self, stage: str, done: int, total: int, figures: Figures) -> None:
        """Show how far a stage is."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        if stage != self.stage:
            self.stage, self.begun, self.due, self.figures = stage, perf_counter(), float(FIRST), Figures()
            self.before = figures.get("tokens", 0)
            label, said = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[said]"))
            columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            self.display = _show(label, *columns, said)
            self.task = self.display.add_task(stage, said="")
        self.figures |= figures
        elapsed = perf_counter() - self.begun
        told = self._told(elapsed)
        self.display.update(self.task, completed=done, total=total, said=", ".join(told))
        if not _watched() and elapsed >= self.due and _speaks():
            self.due = elapsed + EVERY
            time = timedelta(seconds=int(elapsed))
            print(", ".join([f"{stage}: {done} of {total} after {time}", *told]), file=sys.stderr, flush=True)
        if done == total:
            close_bars()

    def _told(self, elapsed: float) -> list[str]:
        """Return the newest figures in few characters."""
        told = [f"{name}={_figure(value)}" for name, value in self.figures.items() if name != "tokens"]
        if new := self.figures.get("tokens", 0) - self.before:
            told += [f"{self.figures['tokens']} tokens", f"{new / max(elapsed, 0.1):.1f} tokens/s"]
        return told


def tracked(work: Sequence[Work], stage: str, progress: Progress) -> Iterator[Work]:
    """Yield the parts of a work, and tell a progress function of each that is done."""
    progress(stage, 0, len(work), {})
    for done, part in enumerate(work, 1):
        yield part
        progress(stage, done, len(work), {})


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on a terminal the work under way, and for how long: until this or all is closed, or more is shown.

    Elsewhere a line says what takes longer than a few seconds.
    """
    from rich.progress import TextColumn, TimeElapsedColumn

    _show(TextColumn(f"{what} ...", markup=False), TimeElapsedColumn(), transient=True).add_task("", total=None)
    if not _watched() and _speaks():
        late = Timer(FIRST, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
        late.daemon = True
        late.start()
        _ends.append(late.cancel)
    try:
        yield
    finally:
        close_bars()


def close_bars() -> None:
    """End the display, before anything else is printed; bars stay on the terminal as they are."""
    while _ends:
        _ends.pop()()


def _show(*columns: "ProgressColumn", transient: bool = False) -> "Display":
    """Show a display in place of the one before, if this is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Display

    close_bars()
    display = Display(*columns, console=Console(file=sys.stderr), transient=transient, redirect_stdout=False)
    if _watched() and _speaks():
        _ends.append(display.stop)
        display.start()
    return display


def _watched() -> bool:
    return sys.stderr.isatty()


def _speaks() -> bool:
    """Return whether this is the first of several processes, or the only one."""
    return not int(os.environ.get("RANK") or 0)


def _figure(value: object) -> str:
    """Return a number, or the first row of a table of hit rates (those of the first draft step), in few characters."""
    if isinstance(value, list):
        return "/".join(f"{rate:.2f}" for rate in value[0])
    return f"{value:.3f}" if isinstance(value, float) else str(value)
