"""Figures as text or HTML: aligned columns, lines that are not too long, values with their intervals.

Knows: strings.  Does not know: what the figures are.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from itertools import zip_longest
from textwrap import wrap

WIDTH = 100  # columns of a terminal, or of a notebook's page
NARROWEST = 20  # columns that a cell keeps
Table = Sequence[Sequence[str]]  # the header, then a row each


def aligned(rows: Table) -> list[str]:
    """Return a line per row, its cells padded to the columns' widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def narrowed(rows: Table) -> list[list[str]]:
    """Return a table's rows; if it is too wide, cells of the widest columns go on in rows of their own below.

    Words are not broken: a path stays whole.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    fold = partial(wrap, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    cells = [[fold(cell, n) if len(cell) > n else [cell] for cell, n in zip(row, widths, strict=True)] for row in rows]
    return [list(line) for row in cells for line in zip_longest(*row, fillvalue="")]


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
