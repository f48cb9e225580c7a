"""Passes that call the model as it is, and what they share with compiled ones: how nodes stand in tensors.

Knows: the inputs of a forward, padding.  Does not know: trees, compilers, what is done with logits.

A forward takes (R, T) tokens.  `Padded` rows have as many as the largest: R = B, and the last node of a row is repeated
as padding, which writes its keys and values beyond the row's slots, where nobody looks.  `SideBySide` the nodes of all
rows are one row, R = 1: each comes with the number of the row whose slots it reads and writes ("sequence packing",
"variable length attention").
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specinfer.attention.cache import TreeCache
from specinfer.attention.forward import Forward, Inputs, Outputs
from specinfer.attention.layout import Columns, Layout, PerNode, Span, attention_mask, padded_order
from specinfer.attention.passes.base import Pass, Result
from specinfer.attention.torch_private import direct_tensors
from specinfer.common.tensors import on_device, padded_width


class Padded:
    """Nodes as B rows of T.

    Where logits are wanted of the last nodes of each row, rows end together, so that these are in the same columns;
    else they begin together.

    Args:
        nodes: the layout.
        width: T at least.
    """

    def __init__(self, nodes: Layout, width: int = 0) -> None:
        sizes, wanted = nodes.sizes, nodes.wanted
        self.sizes, self.index = sizes, nodes.order  # (B, T) which node stands where; None: there is no padding
        self.width = max(*sizes, width) if self.index is None else self.index.shape[1]
        is_end = wanted is not None and all(part.stop == size for part, size in zip(wanted, sizes, strict=True))
        at_end = is_end if self.index is None else nodes.at_end
        self.turn = [self.width - size if at_end else 0 for size in sizes]  # padding on the left
        if self.index is None and min(sizes) < self.width:
            self.index = self._index(nodes.tokens, at_end)
        shifted = [range(p.start + t, p.stop + t) for p, t in zip(wanted, self.turn, strict=True)] if wanted else None
        self.wanted = shifted
        self.columns = None if shifted is None else sorted({column for part in shifted for column in part})

    def _index(self, tokens: Tensor, at_end: bool) -> Tensor:
        """Return (B, T), which of the nodes (N,) stands where."""
        size = self.sizes[0]
        if not size or any(other != size for other in self.sizes):
            return on_device(padded_order(np.array(self.sizes), self.width, at_end)[1], tokens.device)
        columns = torch.arange(self.width, device=tokens.device)  # nothing has to be told
        turned = (columns - self.turn[0]) % self.width if self.turn[0] else columns
        within = turned.clamp_(max=size - 1)[None]
        starts = torch.arange(0, len(tokens), size, device=tokens.device)
        return within + starts[:, None] if len(starts) > 1 else within

    def __call__(self, values: Tensor) -> Tensor:
        """Return values (N, ...) of nodes as (B, T, ...)."""
        return values.unflatten(0, (-1, self.width)) if self.index is None else values[self.index]

    def stage(self, nodes: Layout, before: int | Tensor, cache: TreeCache) -> Inputs:
        """Reserve the slots of the pass; the cache knows them."""
        if cache.located is None:
            cache.stage(nodes.sizes, self.width, self.turn)
            return {}
        slots = (before + nodes.columns).unflatten(0, (len(self.sizes), -1))
        padding = torch.arange(self.width, device=slots.device)
        cache.write_at(slots if self.index is None else slots[:, :1] + padding)  # which is behind the nodes
        return {}

    def logits(self, found: Tensor) -> PerNode:
        """Return the logits of the wanted nodes, from those of the wanted columns of all rows (B, C, V)."""
        if self.wanted is None or self.columns is None:
            return self.states(found)
        first = [self.columns.index(part.start) if part else 0 for part in self.wanted]
        rows = enumerate(zip(first, self.wanted, strict=True))
        return PerNode(found, [Span(row, range(start, start + len(part))) for row, (start, part) in rows])

    def states(self, found: Tensor) -> PerNode:
        """Return the states of nodes, from those of all columns of all rows (B, T, ...)."""
        rows = enumerate(zip(self.turn, self.sizes, strict=True))
        return PerNode(found, [Span(row, range(first, first + size)) for row, (first, size) in rows])


class SideBySide:
    """Nodes as one row of N."""

    def __init__(self, nodes: Layout) -> None:
        self.sizes = nodes.sizes
        self.wanted: Columns = nodes.wanted
        self.columns: list[int] | None = None
        if nodes.wanted is not None:
            rows = zip((0, *accumulate(nodes.sizes)), nodes.wanted, strict=False)
            self.columns = [first + column for first, part in rows for column in part]

    def __call__(self, values: Tensor) -> Tensor:
        """Return values (N, ...) of nodes as (1, N, ...)."""
        return values[None]

    def stage(self, nodes: Layout, before: int | Tensor, cache: TreeCache) -> Inputs:
        """Reserve the slots of the pass; return the row and the slot of each node."""
        if cache.located is None:
            cache.stage(nodes.sizes)
        return {"cache_rows": nodes.rows[None], "cache_slots": (before + nodes.columns)[None]}

    def logits(self, found: Tensor) -> PerNode:
        """Return the logits of the wanted nodes, from (1, C, V)."""
        return self.states(found) if self.wanted is None else PerNode.side_by_side(found, [*map(len, self.wanted)])

    def states(self, found: Tensor) -> PerNode:
        """Return the states of all nodes, from (1, N, ...)."""
        return PerNode.side_by_side(found, self.sizes)


class TensorPass(Pass):
    """A pass through a function of tensors: a forward, compiled or not, over a `TreeCache`."""

    few_shapes = False  # whether a pass of new sizes costs more than padding
    may_cut = False  # whether `run` takes "words", the number of token ids whose logits are enough

    def weights(self, model: Forward) -> tuple[int, ...]:
        """Return numbers that are others when `run` reads weights from other memory: here their addresses."""
        return tuple(tensor.data_ptr() for module in model.modules for _, tensor in direct_tensors(module))

    @abstractmethod
    def run(self, model: Forward, inputs: Inputs, cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run the forward: logits (R, C, V), and the auxiliary hidden states (R, T, K, H) if there are aux_layers."""

    def cache(self, model: Forward, rows: int, capacity: int, max_capacity: int | None, fixed: bool) -> TreeCache:
        """Return an empty cache: see `TreeCache`.  On a GPU attention plans or pads for each new number of slots."""
        return TreeCache(rows, capacity, max_capacity, model.uniform_layers, fixed or model.device.type == "cuda")

    def __call__(self, model: Forward, nodes: Layout, cache: TreeCache, aux_layers: Sequence[int]) -> Result:
        """Feed nodes."""
        placed = self.arranged(nodes, common_width(nodes) if self.few_shapes else 0)
        with model.ranks.together(*nodes[:6], cache.lengths):
            logits, *states = self.through(model, nodes, placed, cache, aux_layers)
        return placed.logits(logits), *map(placed.states, states)

    def arranged(self, nodes: Layout, width: int = 0) -> Padded | SideBySide:
        """Say how nodes stand in the tensors of the forward: in rows of this width at least, unless it packs."""
        return SideBySide(nodes) if self.packs else Padded(nodes, width)

    def through(
        self, model: Forward, nodes: Layout, placed: Padded | SideBySide, cache: TreeCache, aux_layers: Sequence[int]
    ) -> Outputs:
        """Run the forward over nodes: logits of the columns that are wanted, and the states of all."""
        before = nodes.after(cache.lengths) if cache.located is None else cache.located[nodes.rows]
        inputs = placed.stage(nodes, before, cache)
        inputs["input_ids"] = placed(nodes.tokens)
        dtype = self.dtype or model.dtype
        inputs["attention_mask"] = attention_mask(model.spec, nodes, before, dtype, cache.kv_length, placed)
        if model.takes_positions:
            inputs["position_ids"] = placed(_positions(model, nodes, before, cache.kv_length))
        inputs |= {name: placed(values) for name, values in nodes.extra.items()}
        columns = None if placed.columns is None else _numbers(placed.columns, nodes.tokens.device)
        if columns is not None and model.takes_logits_to_keep:
            inputs["logits_to_keep"] = columns
        if self.may_cut and nodes.words is not None:
            inputs["words"] = nodes.words
        logits, *states = self.run(model, inputs, cache, aux_layers)
        return logits if columns is None or model.takes_logits_to_keep else logits[:, columns], *states


def _numbers(columns: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as a tensor; a range is not copied to the device, for no graph could hold that."""
    first, last = columns[0], columns[-1]
    is_range = last - first + 1 == len(columns)
    return torch.arange(first, last + 1, device=device) if is_range else on_device(columns, device)


def common_width(nodes: Layout) -> int:
    """Return the nodes of a row to which a pass is padded, so that few sizes come.

    Later levels of a tree, of which a step has several, keep their sizes.
    """
    largest = max(nodes.sizes)
    return padded_width(largest) if nodes.depths.shape[1] == largest else 0


class PlainPass(TensorPass):
    """Calls the unmodified model."""

    def run(self, model: Forward, inputs: Inputs, cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Call the model, which writes into the cache."""
        output, *states = model.call({**inputs, model.cache_name: cache}, aux_layers)
        return output.logits, *states


def _positions(model: Forward, nodes: Layout, before: int | Tensor, slots: int) -> Tensor:
    """Return (N,) positions, committed length + depth, clamped to the context (the rest is cut later)."""
    positions = nodes.node_depths + before
    if model.max_positions is None or slots <= model.max_positions:
        return positions  # no node is deeper than there are columns
    return positions.clamp(max=model.max_positions - 1)
