"""The output of commands: tables, JSON, the words after Ctrl-C.  It also keeps transformers from printing.

Knows: the terminal.  Does not know: what the figures mean.
"""

import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from specinfer.common.progress import busy, close_bars
from specinfer.common.records import holds_results
from specinfer.common.values import mapped

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
WIDEST = 10_000  # columns where there is no terminal: nothing is folded


def print_json(value: object) -> None:
    """Print a value as one line of JSON; JSON has no words for numbers that are not finite, so they become null."""
    print(json.dumps(mapped(value, _finite), ensure_ascii=False, allow_nan=False, default=str))


def show(rows: Sequence[Mapping[str, object]], as_json: bool = False) -> None:
    """Print rows as JSON, or as a table: folded to the width of a terminal, and a line per row elsewhere."""
    if as_json:
        return print_json(rows)
    from rich.console import Console
    from rich.table import Table

    watched = sys.stdout.isatty()
    console = Console(force_terminal=watched, width=None if watched else WIDEST, markup=False, emoji=False)
    table = Table(*rows[0], box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    with console.capture() as drawn:
        console.print(table)
    return print(*(line.rstrip() for line in drawn.get().splitlines()), sep="\n")


@contextmanager
def loading(what: str | None = None) -> Iterator[None]:
    """Say that models are loaded, for as long as it takes.

    Importing and loading make hardly any garbage, and to look for it takes a sixth of the time: it is not looked for.
    What packages log while they are imported is not for users, and neither is transformers' advice from now on.
    """
    collecting, silenced = gc.isenabled(), logging.root.manager.disable
    gc.disable()
    logging.disable(logging.WARNING)
    try:
        with busy(f"loading {what or 'the models'}"):
            _quieten()
            yield
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


def _quieten() -> None:
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


def _finite(value: object) -> object:
    return value if not isinstance(value, float) or isfinite(value) else None


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
