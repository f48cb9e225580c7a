"""A file of measured rows: cases in phases that share the time, failures that do not end the run, Markdown tables.

Knows: cases, seconds, files.  Does not know: what is measured.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specinfer.errors import InputError

Row = dict[str, Any]


class Case(NamedTuple):
    """One measurement."""

    label: str
    table: str  # of the file, that its rows go to
    measure: Callable[[], list[Row]]


class Report:
    """The file: facts, rows by table, seconds by phase, failures."""

    def __init__(self, path: Path | None, seconds: float, tables: Iterable[str], **facts: Any) -> None:
        self.path, self.seconds, self.started, self.share = path, seconds, perf_counter(), 0.0
        self.data: Row = {**facts, **{name: [] for name in tables}, "seconds": {}, "failures": 0}

    def left(self) -> float:
        """Return the seconds left to the phase."""
        return self.started + self.share * self.seconds - perf_counter()

    def phase(self, name: str, share: float, cases: Iterator[Case]) -> None:
        """Measure cases until the phase's share of the time is over, and what earlier phases left of theirs."""
        began = perf_counter()
        self.share += share
        for case in cases:
            rows, reason, failed = attempt(case.measure) if self.left() > 0 else ([], "no time left", False)
            self.data[case.table] += rows
            self.data["failures"] += failed
            if reason:
                self.data["left_out"].append({"phase": name, "case": case.label, "reason": reason})
                print(f"left out: {name}: {case.label}: {reason}", file=sys.stderr, flush=True)
                free()
            self.write()
        self.data["seconds"][name] = perf_counter() - began
        self.write()
        free()

    def write(self) -> None:
        """Write the file whole, if there is to be one."""
        if self.path is None:
            return
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.data, indent=1))
        os.replace(unfinished, self.path)


def attempt(measure: Callable[[], list[Row]]) -> tuple[list[Row], str, bool]:
    """Measure; return rows, or else why there are none, and whether that is a failure."""
    try:
        return measure(), "", False
    except torch.OutOfMemoryError:
        return [], "does not fit in memory", False
    except InputError as error:  # it is not for this pair
        return [], str(error), False
    except Exception as error:  # the other cases go on
        return [], f"{type(error).__name__}: {str(error).strip()[:300]}", True


def free() -> None:
    """Give back a GPU's memory that nothing uses."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def table(name: str, rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return rows as a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([_text(row.get(column)) for column in columns] for row in rows)]
    return "\n".join([f"**{name}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _text(value: Any) -> str:
    if value is None or value != value or value in ({}, []):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value).replace("\n", " ").replace("|", "/")
