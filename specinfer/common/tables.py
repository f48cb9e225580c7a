"""Figures as text: aligned columns, values with their intervals.

Knows: strings.  Does not know: what the figures are.
"""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, its cells padded to the columns' widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def interval(values: Sequence[float] | None) -> str:
    """Return "value [low, high]"; nothing for None."""
    return "" if values is None else "{:.2f} [{:.2f}, {:.2f}]".format(*values)
