"""Values of the nodes of a batch, such as logits and hidden states, as a pass returned them.

Knows: where each row's nodes are in a tensor.  Does not know: trees, models, which passes pad rows and which join them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Span(NamedTuple):
    """Where the values of one row's nodes are.

    Attributes:
        line: of the tensor.
        columns: of that line.
    """

    line: int
    columns: range


class PerNode:
    """Values of the nodes of B rows: a view of a tensor, nothing is copied to look at a row.

    Args:
        values: (R, T, ...), a line for each row, or one for the nodes of all rows.
        spans: B of them, one for each row.
    """

    def __init__(self, values: Tensor, spans: Sequence[Span]) -> None:
        self.values, self.spans = values, spans

    @classmethod
    def of_rows(cls, rows: Sequence[Tensor | None]) -> "PerNode":
        """Return values of rows, (n, ...) each; None: a row without nodes."""
        given = [row for row in rows if row is not None]
        values = given[0] if len(given) == 1 else torch.cat(given)
        return cls.side_by_side(values[None], [0 if row is None else len(row) for row in rows])

    @classmethod
    def side_by_side(cls, values: Tensor, sizes: Sequence[int]) -> "PerNode":
        """Return values (1, N, ...) of the nodes of all rows, row after row."""
        ends = accumulate(sizes)
        return cls(values, [Span(0, range(end - size, end)) for end, size in zip(ends, sizes, strict=True)])

    @classmethod
    def joined(cls, parts: Sequence["PerNode"]) -> "PerNode":
        """Return values of passes that followed each other, each row's nodes in order."""
        return parts[0] if len(parts) == 1 else cls.of_rows([torch.cat(rows) for rows in zip(*parts, strict=True)])

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return len(self.spans)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.row, range(len(self)))

    def row(self, row: int) -> Tensor:
        """Return the values of one row's nodes, (n, ...), a view."""
        line, columns = self.spans[row]
        return self.values[line, columns.start : columns.stop]

    def part(self, columns: Sequence[range]) -> "PerNode":
        """Return the values of some of each row's nodes."""
        spans = zip(self.spans, columns, strict=True)
        return PerNode(self.values, [Span(line, whole[part.start : part.stop]) for (line, whole), part in spans])

    @property
    def count(self) -> int:
        """Of how many nodes the tensor holds values, padding included."""
        return self.values.shape[0] * self.values.shape[1]

    def flat(self) -> Tensor:
        """Return the values of all rows' nodes, (N, ...), row after row; a view if they lie so."""
        ends = [span.columns.stop for span in self.spans]
        if len(self.values) == 1 and [span.columns.start for span in self.spans] == [0, *ends[:-1]]:
            return self.values[0, : ends[-1]]
        return torch.cat([*self])

    def padded(self) -> Tensor:
        """Return the values as (B, T, ...) with T the most nodes of a row; a view if all rows have as many."""
        (first, *others), sizes = self.spans, {len(span.columns) for span in self.spans}
        if len(self.values) == len(self) and all(span.columns == first.columns for span in others):
            return self.values[:, first.columns.start : first.columns.stop]
        if len(sizes) == 1:
            return self.flat().unflatten(0, (len(self), -1))
        return pad_sequence([*self], batch_first=True)
