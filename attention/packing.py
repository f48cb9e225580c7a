"""Nodes of all rows side by side: a pass over rows of different sizes computes no padding.

Knows: how many nodes each row has, tensors with an entry for each node.  Does not know: trees, models, caches.

A layout has as many nodes in every row.  A compiled pass may take them as one row of N nodes instead, each with the
number of the row whose slots it reads and writes ("sequence packing", "variable length attention").
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specinfer.attention.layout import Layout
from specinfer.attention.per_node import PerNode
from specinfer.common.tensors import on_device


class Packing:
    """Which nodes of B rows of T are one of N.

    A row of padding alone keeps one node, so that it has logits.

    Args:
        layout: the rows.
    """

    def __init__(self, layout: Layout) -> None:
        rows, width = layout.tokens.shape
        sizes = [max(1, size) for size in layout.sizes] or [width] * rows
        self.shape, self.sizes, self.is_ragged = (rows, width), sizes, min(sizes) < width
        device = layout.tokens.device
        every = torch.arange(rows, device=device)[:, None].expand(rows, width)
        self.real: Tensor | None = None  # (B, T), which nodes are no padding, if there is some
        if self.is_ragged:
            self.real = torch.arange(width, device=device) < on_device(sizes, device)[:, None]
        self.rows = self.pack(every)  # (1, N), the row of each node

    def pack(self, values: Tensor) -> Tensor:
        """Return the entries (B, T, ...) of all nodes, (1, N, ...)."""
        return (values.flatten(0, 1) if self.real is None else values[self.real])[None]

    def nodes(self, columns: Sequence[range] | None) -> list[int] | None:
        """Return the numbers of the nodes in some columns of each row, row after row; None of all.

        Where a row has fewer columns, its last node counts.
        """
        if columns is None:
            return None
        starts = [0, *accumulate(self.sizes)][:-1]
        rows = zip(starts, self.sizes, columns, strict=True)
        return [start + min(column, size - 1) for start, size, row in rows for column in row]

    def by_row(self, found: Tensor, columns: Sequence[range] | None = None) -> PerNode:
        """Return what was found for some columns of each row, or for all nodes, (1, N, ...)."""
        return PerNode.side_by_side(found, self.sizes if columns is None else [*map(len, columns)])

    def inputs(self, given: dict[str, Any], slots: Tensor) -> dict[str, Any]:
        """Return the inputs of a forward, (B, T, ...) each, for all nodes, with their rows and slots of the cache."""
        packed: dict[str, Any] = {name: self.pack(value) for name, value in given.items() if name != "attention_mask"}
        mask = given["attention_mask"]
        packed |= {"cache_rows": self.rows, "cache_slots": self.pack(slots)}
        packed["attention_mask"] = (
            self._mask(mask) if isinstance(mask, Tensor) else {kind: self._mask(each) for kind, each in mask.items()}
        )
        return packed

    def _mask(self, mask: Tensor) -> Tensor:
        """Return a mask (B, 1, T, L) for all nodes, (1, 1, N, L)."""
        return self.pack(mask[:, 0])[:, None]
