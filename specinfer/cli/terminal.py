"""What commands print: tables, JSON rows, progress; and what they keep transformers from printing."""

import json
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from specinfer.common.tables import aligned


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; figures that are not finite, which JSON has no words for, as null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str))


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table, or as a JSON list."""
    if as_json:
        print_json(rows)
        return
    columns = list(rows[0])
    print("\n".join(aligned([columns, *([_cell(row[column]) for column in columns] for row in rows)])))


def progress_bars() -> Any:
    """Return a progress function for `distill`: a bar per stage, with the newest figures after it."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}
    newest: dict[str, str] = {}

    def progress(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
        if stage not in bars:
            newest.clear()
            bars[stage] = tqdm(desc=stage, initial=done, total=total, disable=not sys.stderr.isatty())
        newest.update({name: _figure(value) for name, value in figures.items()})
        bars[stage].set_postfix(newest, refresh=False)
        bars[stage].update(done - bars[stage].n)
        if done == total:
            bars[stage].close()

    return progress


def quieten() -> None:
    """Keep transformers' own progress bars and advice off the terminal unless somebody is watching it."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _figure(value: Any) -> str:
    """Return a number, or the first row of a table of them (hit rates of the first draft step), in few characters."""
    if isinstance(value, list):
        return "/".join(f"{rate:.2f}" for rate in value[0])
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
