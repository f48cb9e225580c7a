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

from specinfer.attention.layout import Layout, on_device


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

    def columns(self, wanted: Tensor | Sequence[range]) -> Tensor:
        """Return which nodes are in some columns: (C,) of all rows, or those of each row.

        They follow each other row by row.  Where a row has fewer than C columns, its last node counts.
        """
        starts = [0, *accumulate(self.sizes)][:-1]
        if not isinstance(wanted, Tensor):
            columns = [start + column for start, part in zip(starts, wanted, strict=True) for column in part]
            return torch.tensor(columns, device="cpu")
        sizes, first = (on_device(numbers, wanted.device)[:, None] for numbers in (self.sizes, starts))
        return (first + wanted.minimum(sizes - 1)).flatten()

    def by_row(self, found: Tensor) -> Tensor | Sequence[Tensor]:
        """Return what was found for nodes, (1, N, ...), as (B, T, ...), or of each row where rows differ in size."""
        return found[0].split(self.sizes) if self.is_ragged else found.view(*self.shape, *found.shape[2:])

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
