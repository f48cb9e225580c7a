"""What commands print: tables, JSON, progress bars, what is under way.  It also keeps transformers from printing.

Knows: the terminal.  Does not know: what the figures mean.
"""

import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING, Any

from specinfer.common.records import holds_results
from specinfer.common.tables import aligned, narrowed

if TYPE_CHECKING:
    from specinfer.common.values import Progress

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it

_drawn: list[Any] = []  # bars, closed ones among them


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; JSON has no words for numbers that are not finite, so they become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str))


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table that fits a terminal, or as a JSON list."""
    if as_json:
        print_json(rows)
    else:
        table = [list(rows[0]), *(list(map(_cell, row.values())) for row in rows)]
        print("\n".join(aligned(narrowed(table))))


def bar(unit: str, work: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a progress bar over the work, whose clock ticks; without a terminal, long work prints a line at times."""
    from specinfer.cli.bars import Bar

    drawn = Bar(work, unit, disable=bool(int(os.environ.get("RANK") or 0)), **options)
    if not drawn.disable:
        _drawn.append(drawn)
        Thread(target=_tick, args=[drawn], daemon=True).start()
    return drawn


def close_bars() -> None:
    """Close the bars of work that failed or was interrupted, before anything is said of it."""
    while _drawn:
        _drawn.pop().close()


def _tick(drawn: Any) -> None:
    """Draw a bar every second until it is closed."""
    while True:
        sleep(1)
        with drawn.get_lock():  # closing waits for it, then clears the line
            if drawn.disable:
                return
            drawn.refresh(nolock=True)


def busy(what: str) -> Any:
    """Return a line that says what is under way, and for how long, until it is closed or left."""
    return bar("", desc=what, bar_format="{desc} ... {elapsed}{postfix}", leave=False)


@contextmanager
def loading(what: str | None = None) -> Iterator[Any]:
    """Say that models are loaded, for as long as it takes; yields the line.

    Importing and loading make hardly any garbage, and to look for it takes a sixth of the time: it is not looked for.
    What packages log while they are imported is not for users.
    """
    collecting, silenced = gc.isenabled(), logging.root.manager.disable
    gc.disable()
    logging.disable(logging.WARNING)
    try:
        with busy(f"loading {what or 'the models'}") as line:
            yield line
    finally:
        logging.disable(silenced)
        if collecting:
            gc.freeze()  # what was loaded stays
            gc.enable()


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say after Ctrl-C whether a folder of results holds what the same command can go on from."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} keeps what was finished: run again to continue"
        nothing = "nothing was finished, and nothing is kept"
        close_bars()
        print(f"\nspecinfer: interrupted; {kept if holds_results(out) else nothing}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def after(line: Any, progress: Callable[..., Any]) -> Callable[..., Any]:
    """Return a progress function that closes a line first."""

    def begun(*args: Any) -> Any:
        line.close()
        return progress(*args)

    return begun


def text_bar(total: int = 0) -> "Progress":
    """Return a progress function that shows one bar over all texts; by default, as many as it is given first."""
    texts = bar("text", total=total)

    def progress(batches: list[list[Any]], done: int) -> Iterator[list[Any]]:
        texts.total = total or done + sum(map(len, batches))
        texts.update(done)
        for batch in batches:
            yield batch
            texts.update(len(batch))
        if texts.n >= texts.total:
            texts.close()

    return progress


def stage_bars() -> Any:
    """Return a progress function for stages of work: a bar for each, with the newest figures after it."""
    bars: dict[str, Any] = {}
    newest: dict[str, str] = {}

    def progress(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
        if stage not in bars:
            newest.clear()
            bars[stage] = bar("it", desc=stage, initial=done, total=total)
        newest.update({name: _figure(value) for name, value in figures.items() if "tokens" not in name})  # bars do
        bars[stage].total = total
        bars[stage].set_postfix(newest, refresh=False)
        bars[stage].update(done - bars[stage].n)
        if done == total:
            bars[stage].close()

    return progress


def quieten() -> None:
    """Silence transformers' advice, and its progress bars unless standard error is a terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def only_first_prints() -> None:
    """Keep all but the first of several processes from printing results and bars; errors are still printed."""
    from transformers.utils import logging

    from specinfer.common.ranks import rank

    if rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the rest of the process
        logging.disable_progress_bar()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return value if not isinstance(value, float) or isfinite(value) else None


def _figure(value: Any) -> str:
    """Return a number, or the first row of a table of hit rates (those of the first draft step), in few characters."""
    if isinstance(value, list):
        return "/".join(f"{rate:.2f}" for rate in value[0])
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
