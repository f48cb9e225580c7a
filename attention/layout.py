"""How the nodes of a batch become one forward pass and back: which tokens, who sees whom, whose values are whose.

Knows: token ids, depths, committed lengths, rows of different sizes, the mask conventions of transformers.
Does not know: models, caches, what tokens mean.

A *layout* is flat: the N nodes of all B rows, row after row.  Each row has *pending columns*: those of earlier passes
of the step, then these nodes.  A node attends to its ancestors among its row's pending columns and to itself.  This is
the topology-aware mask of SpecInfer (arXiv 2305.09781, section 4.2).  Every node sees all committed tokens of its row,
so these are not stored.

The mask has the form that each attention implementation takes:

    sdpa, eager       additive float (R, 1, T, L): 0 = attend.  With a bool mask eager is silently wrong (it adds 0/1),
                      and sdpa converts the mask again in every layer
    flex_attention    BlockMask
    several layer types (gemma2, gemma3, gpt-oss ...): a dict, one mask per type

transformers passes a 4-D mask through unchanged, so a sliding window must be in it.  The window is measured between
tree *positions* (committed length + depth), not between cache columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specinfer.attention.context import AttentionSpec
from specinfer.common.tensors import on_device
from specinfer.tree import Forest, Frontier, Slots, TokenTree

Columns = Sequence[range] | None  # of each row, nodes of a layout; None: all
FEW = 64  # nodes of chains whose layouts are kept: plain steps and drafts' levels repeat them


class Layout(NamedTuple):
    """The nodes of one forward pass over B rows, N in all."""

    tokens: Tensor  # (N,) long
    rows: Tensor  # (N,) long, the row of each node
    columns: Tensor  # (N,) long, the pending column of each node in its row
    visible: Tensor  # (N, S) bool; [n, s] = node n attends to pending column s of its row
    depths: Tensor  # (B, S) long; position of every pending column = committed length + depth
    node_depths: Tensor  # (N,) long, the depth of each node
    sizes: Sequence[int]  # nodes of each row
    wanted: Columns = None  # the nodes whose logits are wanted
    extra: Mapping[str, Tensor] = {}  # what else a model's forward takes, by name: (N, ...) each
    order: Tensor | None = None  # of padded rows, (B, T): which value of `extra` stands where
    at_end: bool = False  # whether padding comes before a row's nodes
    words: int | None = None  # how many token ids, from 0 on, logits are wanted of; None = all

    def at_depths(self, depths: Tensor) -> "Layout":
        """Return the layout with other depths of its pending columns, (B, S)."""
        return self._replace(depths=depths, node_depths=depths[self.rows, self.columns])

    def after(self, lengths: Sequence[int]) -> int | Tensor:
        """Return how many committed tokens stand before each node, (N,), or for all nodes if rows have as many."""
        return lengths[0] if len({*lengths}) == 1 else on_device(lengths, self.tokens.device)[self.rows]


def lay_out_trees(
    trees: Sequence[TokenTree], device: torch.device, unread: Sequence[Sequence[int]] = (), width: int = 0
) -> Layout:
    """Lay out one tree per row, depth first, root included, each below tokens of its row that no pass has read yet.

    Args:
        trees: one per row.
        device: of the tensors.
        unread: token ids per row, possibly none, before the root; logits are wanted of the trees alone.  () = none.
        width: nodes that each row is padded to, behind its own; 0 = none is.
    """
    nodes = Forest.of(trees).nodes
    if not unread and np.array_equal(nodes.depths[nodes.starts[1:] - 1] + 1, nodes.sizes):  # each row is one path
        return _lay_out(nodes.tokens.copy(), nodes.sizes.tolist(), device, width)
    before = np.array([*map(len, unread)], np.int64) if unread else np.zeros_like(nodes.sizes)
    layout = _Rows(nodes.sizes + before)
    columns = nodes.columns + before[nodes.rows]
    numbers = layout.starts[nodes.rows] + columns
    tokens, depths = np.empty_like(layout.rows), layout.columns.copy()
    tokens[numbers], depths[numbers] = nodes.tokens, nodes.depths + before[nodes.rows]
    layout.ends[nodes.rows, columns] = columns + nodes.subtrees
    if unread:
        tokens[layout.columns < before[layout.rows]] = [*chain(*unread)]
    wanted = [range(first, size) for first, size in zip(before.tolist(), layout.sizes.tolist(), strict=True)]
    return layout.done(tokens, depths, device, width)._replace(wanted=wanted if before.any() else None)


def lay_out_slots(slots: Slots, roots: Sequence[int]) -> Layout:
    """Lay out B trees that are still on their device, as rows of as many nodes as they have at most, padded to T.

    Args:
        slots: of the trees.
        roots: the root token of each row.
    """
    (batch, width), device = slots.tokens.shape, slots.tokens.device
    form, _ = _form((width,) * batch, device, width, False)
    return form._replace(
        tokens=torch.cat([on_device(roots, device)[:, None], slots.tokens[:, 1:]], 1).flatten(),
        visible=slots.visible.flatten(0, 1),
        depths=slots.depths,
        node_depths=slots.depths.flatten(),
        sizes=[1 + slots.nodes] * batch,
    )


def lay_out_chains(
    chains: Sequence[Sequence[int]], device: torch.device, width: int = 0, at_end: bool = True
) -> Layout:
    """Lay out one chain of tokens per row, possibly none.

    Args:
        chains: token ids of each row.
        device: of the tensors.
        width: nodes that each row is padded to; 0 = none is.
        at_end: whether padding comes before a row's nodes, so that all end together.
    """
    return _lay_out(np.array([*chain(*chains)], np.int64), [*map(len, chains)], device, width, at_end)


def _lay_out(
    tokens: np.ndarray, sizes: Sequence[int], device: torch.device, width: int, at_end: bool = False
) -> Layout:
    """Lay out chains of B rows; only their tokens (N,) go to the device if chains of these sizes came before."""
    form, order = (_form if len(tokens) <= FEW else _form.__wrapped__)((*sizes,), device, width, at_end)
    return form._replace(tokens=on_device(tokens if order is None else tokens[order], device))


@lru_cache(256)
@torch.inference_mode(False)  # for whoever comes next
def _form(sizes: tuple[int, ...], device: torch.device, width: int, at_end: bool) -> tuple[Layout, np.ndarray | None]:
    """Return the layout of chains of these sizes, and which of their tokens stand where; None: all, in order."""
    rows = _Rows(np.array(sizes, np.int64))
    order = padded_order(rows.sizes, width, at_end)[1].ravel() if width else None
    return rows.done(np.zeros_like(rows.rows), rows.columns, device, width, at_end), order


class _Rows:
    """Rows of different sizes on the host: chains, until the ends of subtrees say otherwise."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes  # (B,)
        self.starts = np.cumsum(sizes) - sizes  # (B,)
        self.rows = np.repeat(np.arange(len(sizes)), sizes)  # (N,)
        self.columns = np.arange(len(self.rows)) - self.starts[self.rows]  # (N,)
        self.ends = np.tile(sizes[:, None], (1, sizes.max()))  # (B, S), of each column's subtree, which lies together

    def done(
        self, tokens: np.ndarray, depths: np.ndarray, device: torch.device, width: int = 0, at_end: bool = False
    ) -> Layout:
        """Return the layout of nodes with these tokens and depths, (N,) each, and of padding to a width.

        The last node of a row is repeated as padding, in columns behind the row's own.
        """
        columns = self.columns[:, None]
        visible = (np.arange(self.ends.shape[1]) <= columns) & (columns < self.ends[self.rows])
        rows, numbers, index = self.rows, self.columns, None
        if width:
            numbers, index = (each.ravel() for each in padded_order(self.sizes, width, at_end))
            rows = np.repeat(np.arange(len(self.sizes)), width)
            tokens, depths = tokens[index], depths[index]
            visible = np.pad(visible[index], ((0, 0), (0, width - visible.shape[1])))
        by_row = np.zeros((len(self.sizes), visible.shape[1]), np.int64)
        by_row[rows, numbers] = depths
        parts = [tokens, rows, numbers, depths, by_row.ravel(), *([] if index is None else [index])]
        packed = on_device(np.concatenate(parts), device)  # one transfer
        ids, of_rows, of_columns, of_nodes, below, *stand = packed.split([part.size for part in parts])
        padding = {"order": stand[0].view(-1, width), "at_end": at_end} if width else {}
        whole = on_device(visible, device), below.view(by_row.shape), of_nodes, self.sizes.tolist()
        return Layout(ids, of_rows, of_columns, *whole, **padding)


def padded_order(sizes: np.ndarray, width: int, at_end: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the column, and the node among all, at each place of rows of these sizes that are padded to a width.

    Args:
        sizes: (B,) of the rows, some of which may have no nodes.
        width: of all rows.
        at_end: whether padding comes before a row's nodes.

    Returns:
        columns and nodes, (B, width) each; the last node of a row is repeated as padding.
    """
    numbers = (np.arange(width) - (width - sizes[:, None]) * at_end) % width
    starts = np.cumsum(sizes) - sizes
    nodes = starts[:, None] + np.clip(numbers, 0, np.maximum(sizes[:, None] - 1, 0))
    return numbers, np.minimum(nodes, sizes.sum() - 1)


def lay_out_level(frontier: Frontier, earlier: Layout | None, device: torch.device) -> Layout:
    """Lay out one level of growing trees, whose earlier levels are pending columns already: W nodes of each row.

    The root, node 0, is committed before growth starts.  So level 1 has no pending ancestors, and pending columns are
    nodes 1, 2, ...  Padding is laid out as a node.

    Args:
        frontier: the level, (B, W); all of its tokens are ids of the model.
        earlier: the layout of the level before; None at level 1.
        device: of the layout.
    """
    tokens = frontier.tokens.to(device)
    first = 0 if earlier is None else earlier.depths.shape[1]
    form = _level_form if device.type == "cpu" else _level_form.__wrapped__  # a graph makes its own
    rows, columns, visible = form(*tokens.shape, first, device)
    depths = torch.full_like(tokens, frontier.depth - 1)
    of_nodes = depths.flatten()
    if earlier is not None:
        last = earlier.sizes[0]  # nodes of the level before, in each row
        parents = (frontier.parents.to(device) - (1 + first - last)).clamp_(0, last - 1)  # (B, W) within that level
        visible = torch.cat([earlier.visible[parents.flatten() + rows * last], visible], 1)
        depths = torch.cat([earlier.depths, depths], 1)
    return Layout(tokens.flatten(), rows, columns, visible, depths, of_nodes, [tokens.shape[1]] * len(tokens))


@lru_cache(256)
@torch.inference_mode(False)  # for whoever comes next
def _level_form(batch: int, width: int, first: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and pending column of each node of a level, (N,), and which of these columns it sees, (N, width)."""
    rows = torch.arange(batch, device=device).repeat_interleave(width)
    columns = torch.arange(first, first + width, device=device).repeat(batch)
    return rows, columns, torch.eye(width, dtype=torch.bool, device=device).repeat(batch, 1)


def attention_mask(
    spec: AttentionSpec,
    layout: Layout,
    before: int | Tensor,
    dtype: torch.dtype,
    kv_length: int,
    arrange: Callable[[Tensor], Tensor] = lambda values: values[None],
) -> Any:
    """Build the mask of one pass over the committed prefix and the pending columns.

    Args:
        spec: the model's attention.
        layout: the pass's nodes; S pending columns.
        before: the committed slots before each node: see `Layout.after`.
        dtype: the model's floating type, for additive masks.
        kv_length: L, the columns of the pass; those behind a row's S pending ones are hidden.
        arrange: from values of nodes (N, ...) to the (R, T, ...) of the forward; one row of all nodes by default.

    Returns:
        What the model's ``attention_mask`` argument takes: one mask (R, 1, T, L), or a dict of masks by layer type.
    """

    def mask(window: int | None) -> Any:
        window = None if window is None or kv_length <= window else window  # no node is deeper than there are columns
        is_near = window is None or layout.visible.shape[1] <= window  # whether nodes see all of their ancestors
        if is_near and isinstance(before, int) and spec.implementation != "flex_attention":
            return arrange(_additive(layout, before, window, dtype, kv_length))[:, None]
        return _converted(spec.implementation, arrange(_visible(layout, before, window, kv_length)), dtype)

    masks = {name: mask(window) for name, window in spec.windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _additive(layout: Layout, before: int, window: int | None, dtype: torch.dtype, kv_length: int) -> Tensor:
    """Return the mask (N, L) where all nodes have as many slots before them, above all of a single row.

    A window leaves out committed slots alone.
    """
    count, pending = layout.visible.shape
    mask, lowest = layout.visible.new_zeros(count, kv_length, dtype=dtype), torch.finfo(dtype).min
    mask[:, before : before + pending].masked_fill_(~layout.visible[:, : kv_length - before], lowest)
    if kv_length > before + pending:
        mask[:, before + pending :] = lowest
    if window is not None:
        far = layout.node_depths[:, None] + (before - window)
        mask[:, :before].masked_fill_(torch.arange(before, device=mask.device) <= far, lowest)
    return mask


def _visible(layout: Layout, before: int | Tensor, window: int | None, kv_length: int) -> Tensor:
    """Return (N, L) bool: which of the L columns of its row each node attends to."""
    count, pending = layout.visible.shape
    first = before[:, None] if isinstance(before, Tensor) else before
    columns = torch.arange(kv_length, device=layout.visible.device)
    relative = (columns - first).expand(count, -1)  # (N, L): < 0 committed, 0 <= .. < S pending, beyond: free
    index = relative.clamp(0, pending - 1)
    visible = torch.where(relative < 0, True, layout.visible.gather(1, index) & (relative < pending))
    if window is None:
        return visible
    depths = layout.depths[layout.rows].gather(1, index)
    keys = torch.where(relative < 0, columns, first + depths)  # positions
    queries = first + layout.node_depths[:, None]
    return visible & (queries - keys < window)


def _converted(implementation: str, visible: Tensor, dtype: torch.dtype) -> Any:
    if implementation != "flex_attention":
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, keys = visible.shape
    return create_block_mask(
        lambda b, _head, q, k: visible[b, q, k], batch, None, queries, keys, device=str(visible.device)
    )


class Span(NamedTuple):
    """Where the values of one row's nodes are.

    Attributes:
        line: of the tensor.
        columns: of that line.
    """

    line: int
    columns: range


@lru_cache(256)
def _spans(sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """Return where rows of these sizes are that lie side by side; plain steps ask for the same again and again."""
    return tuple(Span(0, range(end - size, end)) for end, size in zip(accumulate(sizes), sizes, strict=True))


class PerNode(Sequence[Tensor]):
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
        return cls(values, _spans((*sizes,)))

    @classmethod
    def joined(cls, parts: Sequence["PerNode"]) -> "PerNode":
        """Return values of passes that followed each other, each row's nodes in order."""
        return parts[0] if len(parts) == 1 else cls.of_rows([torch.cat(rows) for rows in zip(*parts, strict=True)])

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return len(self.spans)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...

    @overload
    def __getitem__(self, row: slice) -> list[Tensor]: ...

    def __getitem__(self, row: int | slice) -> Tensor | list[Tensor]:
        return [self.row(each) for each in range(len(self))[row]] if isinstance(row, slice) else self.row(row)

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
    def held(self) -> int:
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
