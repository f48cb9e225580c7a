"""Figures as text or HTML: aligned columns, lines that are not too long, values with their intervals.

Knows: strings.  Does not know: what the figures are.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from textwrap import wrap

WIDTH = 100  # columns of a terminal, or of a notebook's page
Table = Sequence[Sequence[str]]  # the header, then a row each


class Tabular(ABC):
    """Base of reports: prose and tables, as text of at most `WIDTH` columns, and as HTML in notebooks."""

    @abstractmethod
    def _parts(self) -> Iterable[str | Table]:
        """Return prose, any number of lines, and tables, in order."""

    def __str__(self) -> str:
        """Return the report as text; an empty line follows a table."""
        lines: list[str] = []
        for part in self._parts():
            if isinstance(part, str):
                lines += folded(part.split("\n"))
            else:
                lines += [line for table in fitted(part) for line in (*table, "")]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        parts = (f"<pre>{escape(p.strip())}</pre>" if isinstance(p, str) else html_table(p) for p in self._parts())
        return "\n".join(parts)


def aligned(rows: Table) -> list[str]:
    """Return a line per row, its cells padded to the columns' widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def fitted(rows: Table) -> list[list[str]]:
    """Return a table as aligned lines, indented; one that is too wide as several, with the first column in each."""
    tables: list[list[str]] = []
    columns, taken = list(zip(*rows, strict=True)), 1
    while taken < len(columns):
        last = taken + 1
        while last < len(columns) and _width([columns[0], *columns[taken : last + 1]]) <= WIDTH:
            last += 1
        kept = [columns[0], *columns[taken:last]]
        tables.append(aligned([("", *row) for row in zip(*kept, strict=True)]))
        taken = last
    return tables


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(2 + max(map(len, column)) for column in columns)


def folded(lines: Iterable[str]) -> list[str]:
    """Return prose without lines that are too long; what is continued is indented."""
    fold = partial(wrap, width=WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in fold(line) or [""]]


def html_table(rows: Table) -> str:
    """Return a table as an HTML element that scrolls where it is too wide."""
    head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    head = head.replace("td>", "th>")
    return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def interval(values: Sequence[float] | None) -> str:
    """Return "value [low, high]", the value alone where nothing varies, as of one prompt, and nothing for None."""
    if values is None:
        return ""
    value, low, high = values
    return f"{value:.2f}" if low == high else f"{value:.2f} [{low:.2f}, {high:.2f}]"
