"""The KV cache of a batch of rows that grow trees: preallocated, ragged, pruned in place.

Knows: buffers, the length of each row, which slots the next pass writes, which of them are kept.
Does not know: tokens, trees, masks, models.

Every row has ``lengths[b]`` *committed* slots, followed by the *pending* slots of the current step, which are
written by forward passes and then either kept (moved down to follow the committed ones) or forgotten:

    row 0   c c c c c c p p p .        c committed, p pending (the step's nodes), . free
    row 1   c c c p p . . . . .

A pass that pads rows writes beyond their pending slots, where the next pass writes again.

It implements transformers' cache interface (``Cache.update``), so unmodified models write into it.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, pairwise
from math import prod
from operator import add
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specinfer.common.tensors import on_device, padded_kv_length
from specinfer.errors import CacheError

GROWTH = 4  # times the rows that buffers have room for on a CPU, when more rows join


class Stack:
    """Buffers of several layers in one tensor, (layers, rows, heads, capacity, dim), so slots of all move at once.

    They start as zeros: a masked slot still counts as 0 times its value, and 0 times garbage may be NaN.
    """

    def __init__(self, layers: int, states: Tensor, rows: int, capacity: int) -> None:
        self.hold(_zeros(states, layers, rows, states.shape[1], capacity, states.shape[3]))
        self.taken = 0  # layers

    def hold(self, data: Tensor) -> None:
        """Replace the buffers."""
        self.data = data
        self.planes = torch.arange(data.shape[:3].numel(), device=data.device).view(data.shape[:3])  # of (slots, dim)

    def fits(self, states: Tensor) -> bool:
        """Whether another layer fits in, whose states, (rows, heads, T, dim), have this shape."""
        kinds = [(data.shape[-3], data.shape[-1], data.dtype, data.device) for data in (states, self.data)]
        return self.taken < len(self.data) and kinds[0] == kinds[1]

    def resize(self, rows: int, capacity: int, used: Sequence[int]) -> None:
        """Make room for at least these rows, and these slots; ``used``: the slots of each row that are kept.

        Where rows do not fit, buffers on a CPU get four times as many: rows that nobody uses take hardly any memory
        there, and copying all rows whenever others join takes long.
        """
        layers, before, heads, slots, dim = self.data.shape
        if rows > before or capacity != slots:
            growth = GROWTH if rows > before and self.data.device.type == "cpu" else 1
            larger = _zeros(self.data, layers, max(rows, growth * before), heads, capacity, dim)
            _copy_rows(larger, 0, self.data, [min(count, slots) for count in used])
            self.hold(larger)  # now that it is whole: Ctrl-C may come at any time, and what was read is kept then

    def move_slots(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots of rows, (n,) each."""
        first = self.planes[:, rows] * self.data.shape[3]  # (layers, n, heads): slot 0
        flat = self.data.view(-1, self.data.shape[4])
        found = flat.index_select(0, (first + sources[:, None]).flatten())  # before anything is written
        flat.index_copy_(0, (first + targets[:, None]).flatten(), found)


class TreeLayer(CacheLayerMixin):
    """Keys and values of one attention layer: views (rows, KV heads, capacity, head dim) of the cache's stacks."""

    is_sliding = False

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()
        self.cache = cache
        self.stacks: list[tuple[Stack, int]] = []  # of keys and of values: a stack, and the layer's index in it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take buffers for states like the first ones, (rows, heads, T, dim)."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.stacks = [self.cache.stack(states, kind) for kind, states in enumerate((key_states, value_states))]
        self.is_initialized = True
        self.take_buffers()

    def take_buffers(self) -> None:
        """Take the buffers as they are now."""
        self.keys, self.values = (stack.data[index] for stack, index in self.stacks)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, T, dim) states into the staged slots; return views of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        return self.cache.write(keys, key_states), self.cache.write(values, value_states)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The key and the value buffer."""
        return self.keys, self.values  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, key offset); models ask only if they get no 4-D mask."""
        return self.cache.kv_length, 0

    def get_seq_length(self) -> int:
        """Return the committed length of the longest row."""
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        """Return the most slots a row may ever hold."""
        return self.cache.max_capacity


class TreeCache(Cache):
    """KV cache for token trees on transformers' interface.

    Args:
        rows: sequences in the batch.
        capacity: slots per row allocated at first; doubles when a pass needs more.  When rows join and no row needs
            half of what there is, it shrinks to the first value again.
        max_capacity: the most slots per row; beyond it ``stage`` raises `CacheError`.
        uniform_layers: how many layers have the shape of the first one, as far as is known; they share a tensor.
        fixed: let passes attend to few different numbers of slots, and write where `slots` says.  Then passes over one
            number of slots do the same work for all lengths, as a CUDA graph needs.

    Attributes:
        first_capacity: slots per row that rows want at first; a cache that rows join, and that moves, gets theirs.

    Memory is ``2 * layers * rows * kv_heads * capacity * head_dim`` elements (see `nbytes`), and two and a half times
    that while it doubles; on a CPU, only pages that were written to take some, of 2 MB where the system has them.  Only
    `keep`, `join` and the rare growth copy rows.
    """

    def __init__(
        self, rows: int, capacity: int, max_capacity: int | None = None, uniform_layers: int = 1, fixed: bool = False
    ) -> None:
        # `update` makes layers; a cycle would keep the buffers until garbage is collected
        super().__init__(layer_class_to_replicate=partial(TreeLayer, weakref.proxy(self)))  # type: ignore[arg-type]
        self.layers: list[TreeLayer]  # type: ignore[assignment]  # a narrower type than the base class's
        if rows < 1 or capacity < 1:
            raise CacheError(f"a cache needs at least one row and one slot, not {rows} rows of {capacity} slots")
        self.rows = rows
        self.capacity = self.first_capacity = capacity
        self.max_capacity = max(capacity, max_capacity or 0)
        self.lengths: list[int] = [0] * rows  # committed slots of each row
        self.uniform_layers = uniform_layers
        self.stacks: tuple[list[Stack], list[Stack]] = [], []  # of keys, and of values
        self.fixed = fixed
        self.pending = [0] * rows  # slots of each row that were written since the last `keep`
        self.kv_length = 0  # columns that the current pass attends to
        self._staged: slice | None = None  # the slots that a pass writes, if they are the same in every row ...
        self.slots: Tensor | None = None  # ... else those of all rows, (rows, T)
        self._first, self._turn, self._width = [0] * rows, cast(Sequence[int], ()), 0  # as `stage` was told
        self.located: Tensor | None = None  # the committed lengths, (rows,), in a block of `locate`
        self._buffers: tuple[list[Tensor], list[Tensor]] | None = None  # see `buffers`

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(stack.data.nbytes for kind in self.stacks for stack in kind)

    @property
    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Addresses and shapes of all buffers."""
        return tuple((stack.data.data_ptr(), stack.data.shape) for stack in chain(*self.stacks))

    def stage(self, sizes: Sequence[int], width: int = 0, turn: Sequence[int] = ()) -> None:
        """Reserve the next slots of every row for the pass that follows.

        Args:
            sizes: how many each row needs.
            width: T, how many it writes, padding included; 0 = the pass knows the slots of its nodes.
            turn: per row, how many of the T are padding on the left, which is written behind the others; () = none.

        Raises:
            CacheError: a row would need more than ``max_capacity`` slots.
        """
        first = list(map(add, self.lengths, self.pending))
        self.kv_length = max(map(add, first, sizes))
        self._reserve(self.kv_length, max(first) + width)
        if width:
            same = len(set(first)) == 1 and not (self.fixed or any(turn))
            self._staged = slice(first[0], first[0] + width) if same else None
            self._first, self._width, self._turn = first, width, turn
            self.slots = None
        if self.fixed:
            self.kv_length = min(padded_kv_length(self.kv_length), self.capacity)
        self.pending = list(map(add, self.pending, sizes))

    def staged(self, device: torch.device) -> Tensor:
        """Return the slots that the pass writes, (rows, T) long."""
        if self.slots is None:
            columns = torch.arange(self._width, device=device)
            if any(self._turn):
                columns = (columns - on_device(self._turn, device)[:, None]) % self._width
            self.slots = on_device(self._first, device)[:, None] + columns
        return self.slots

    def room(self, slots: int) -> int:
        """Make room for more slots after the longest row; return how many slots passes then attend to."""
        needed = max(self.lengths) + slots
        self._reserve(needed)
        return min(padded_kv_length(needed), self.capacity)

    @contextmanager
    def locate(self, lengths: Tensor, kv_length: int) -> Iterator[None]:
        """Let passes find the committed lengths on the device, so that they do the same work whatever these are.

        They say themselves which slots they write (`write_at`), for which there is `room`.

        Args:
            lengths: (rows,) long; of more rows than there are, if there is memory for them (`make_rows`).
            kv_length: slots that all passes attend to.
        """
        rows, self.rows, self._buffers = self.rows, len(lengths), None
        self.located, self.kv_length = lengths, kv_length
        try:
            yield
        finally:
            self.rows, self._buffers = rows, None
            self.located = self.slots = None

    def make_rows(self, rows: int) -> None:
        """Make room for these rows, though fewer are in use."""
        if any(rows > stack.data.shape[1] for stack in chain(*self.stacks)):
            self._resize(rows, self.capacity)

    def write_at(self, slots: Tensor) -> None:
        """Write these slots, (rows, T) long, in the pass that follows."""
        self._staged, self.slots = None, slots

    def open_layers(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers of layers not yet written; ``shapes``: per layer, heads and dim of keys, then of values."""
        for heads, dim, value_heads, value_dim in shapes[len(self.layers) :]:
            layer, empty = TreeLayer(weakref.proxy(self)), torch.empty(0, dtype=dtype, device=device)
            layer.lazy_initialization(empty.view(0, heads, 0, dim), empty.view(0, value_heads, 0, value_dim))
            self.layers.append(layer)

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of all layers, (rows, heads, capacity, dim) each."""
        if self._buffers is None:
            keys, values = zip(*(layer.buffers for layer in self.layers), strict=True)
            self._buffers = [buffer[: self.rows] for buffer in keys], [buffer[: self.rows] for buffer in values]
        return self._buffers

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write (rows, heads, T, dim) states into the staged slots of a buffer; return a view of all slots in use."""
        if self._staged is not None:
            buffer[: self.rows, :, self._staged] = states
        else:
            slots = on_device(self.staged(buffer.device), buffer.device)  # layers may execute on several devices
            buffer[_all_rows(self.rows, slots.device), :, slots] = states.transpose(1, 2)
        return buffer[: self.rows, :, : self.kv_length]

    def stack(self, states: Tensor, kind: int) -> tuple[Stack, int]:
        """Return the stack for the keys (kind 0) or values (1) of one more layer, and the layer's index in it."""
        stacks = self.stacks[kind]
        stack = next((stack for stack in stacks if stack.fits(states)), None)
        if stack is None:
            stack = Stack(1 if stacks else self.uniform_layers, states, self.rows, self.capacity)
            stacks.append(stack)
        stack.taken += 1
        return stack, stack.taken - 1

    @torch.inference_mode()
    def restart(self, rows: int, max_capacity: int | None = None) -> None:
        """Forget everything and start again with this many rows; buffers for them exist: `rows` was once as large."""
        for stack in chain(*self.stacks):
            stack.data.zero_()
        self.rows, self.lengths, self.pending = rows, [0] * rows, [0] * rows
        self.max_capacity = max(self.capacity, max_capacity or 0)
        self._buffers = None

    @torch.inference_mode()  # the buffers were made in it
    def keep(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Commit the pending slots ``paths[b]`` of every row, and forget the others.  In place.

        ``paths[b]`` holds strictly ascending indices of pending slots (0 = the first slot written since the last
        `keep`).  An empty path keeps nothing.  ``None`` retires the row, and the rows after it move up.
        """
        self._check_paths(paths)
        if not any(self.pending) and None not in paths:
            return
        moves = [
            (row, self.lengths[row] + source, self.lengths[row] + target)
            for row, path in enumerate(paths)
            for target, source in enumerate(path or ())
            if source != target
        ]
        stacks = list(chain(*self.stacks))
        if moves:
            columns = on_device(moves, stacks[0].data.device).T
            for stack in stacks:
                stack.move_slots(*on_device(columns, stack.data.device))
        self.lengths = [n + len(path or ()) for n, path in zip(self.lengths, paths, strict=True)]
        survivors = [row for row, path in enumerate(paths) if path is not None]
        self.pending = [0] * len(survivors)
        if len(survivors) == self.rows:
            return
        for target, source in enumerate(survivors):
            if target != source:
                slots = slice(self.lengths[source])
                for stack in stacks:
                    stack.data[:, target, :, slots] = stack.data[:, source, :, slots]
        self.lengths = [self.lengths[row] for row in survivors]
        self.rows = len(survivors)
        self._buffers = None

    @torch.inference_mode()
    def join(self, other: "TreeCache") -> None:
        """Take in the rows of another cache of the same model, after the own ones; nothing may be pending in either."""
        if count := sum([*self.pending, *other.pending]):
            raise CacheError(f"caches are joined between steps, not with {count} slots pending")
        self.max_capacity = max(self.max_capacity, other.max_capacity)
        longest = max((*self.lengths, *other.lengths), default=0)
        self._reserve(longest)
        self._open_layers_of(other)
        enough, rows = max(longest, self.first_capacity, other.first_capacity), self.rows + other.rows
        shrinks = 2 * enough < self.capacity and not self.fixed  # perhaps long rows have left
        moves = any(rows > stack.data.shape[1] for stack in chain(*self.stacks))
        self._resize(rows, enough if shrinks or (moves and enough > self.capacity) else self.capacity)
        if other.layers:
            for mine, theirs in zip(chain(*self.stacks), chain(*other.stacks), strict=True):
                if self.fixed:  # a graph has fed rows beyond the batch, perhaps numbers that are none
                    mine.data[:, self.rows : rows].zero_()
                _copy_rows(mine.data, self.rows, theirs.data, other.lengths)
        self.rows += other.rows
        self.lengths, self.pending = [*self.lengths, *other.lengths], [0] * self.rows
        self._buffers = None

    @torch.inference_mode()
    def begin(self, row: int, other: "TreeCache", source: int, length: int) -> None:
        """Begin a row with the first slots of a row of another cache of the same model.

        Raises:
            CacheError: the row has slots already, or the other has fewer.
        """
        if any((*self.pending, self.lengths[row])) or not 0 < length <= other.lengths[source]:
            held = f"row {row}, of {self.lengths[row]} slots and {self.pending} pending"
            raise CacheError(f"{held}, cannot begin with {length} of {other.lengths[source]} others")
        self._reserve(length)
        self._open_layers_of(other)
        for mine, theirs in zip(chain(*self.stacks), chain(*other.stacks), strict=True):
            mine.data[:, row, :, :length] = theirs.data[:, source, :, :length]
        self.lengths[row] = length

    def copy_of(self, row: int, length: int) -> "TreeCache":
        """Return a cache of one row: the first slots of one of these."""
        found = TreeCache(1, length, uniform_layers=self.uniform_layers)
        found.begin(0, self, row, length)
        return found

    def forget(self, counts: Sequence[int]) -> None:
        """Drop the last ``counts[b]`` committed slots of every row; nothing may be pending."""
        lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        if any(self.pending) or min((*counts, *lengths), default=0) < 0:
            raise CacheError(f"cannot forget {list(counts)} of {self.lengths} slots, with {self.pending} pending")
        self.lengths = lengths

    def check_integrity(self) -> None:
        """Raise `CacheError` unless lengths, pending slots, buffers and layers agree, as they do after every commit."""
        used = max(map(add, self.lengths, self.pending), default=0)
        counts = [*self.lengths, *self.pending]
        if len(self.lengths) != self.rows or len(counts) != 2 * self.rows or min(counts, default=0) < 0:
            raise CacheError(f"{self.rows} rows but lengths {self.lengths} with {self.pending} pending slots")
        if used > min(self.capacity, self.max_capacity):
            raise CacheError(f"{used} slots in use, capacity {self.capacity}, maximum {self.max_capacity}")
        for index, layer in enumerate(self.layers):
            for shape in (tuple(buffer.shape) for buffer in layer.buffers if layer.is_initialized):
                if shape[0] < self.rows or shape[2] != self.capacity:
                    raise CacheError(f"layer {index} holds {shape}, expected {self.rows}+ rows of {self.capacity}")

    def _open_layers_of(self, other: "TreeCache") -> None:
        """Open the layers that another cache has and this one lacks, because no pass has run here."""
        for layer in other.layers[len(self.layers) :]:
            self.layers.append(TreeLayer(weakref.proxy(self)))
            if layer.is_initialized:
                self.layers[-1].lazy_initialization(*(stack.data[index] for stack, index in layer.stacks))

    def _reserve(self, needed: int, written: int = 0) -> None:
        """Make room for the needed slots of every row, and for those that padding is written to, beyond the maximum."""
        if needed > self.max_capacity:
            advice = "shorten the prompt, ask for fewer new tokens, or use a smaller tree"
            raise CacheError(f"a row needs {needed} cache slots but the maximum is {self.max_capacity}: {advice}")
        if (room := max(needed, written)) > self.capacity:
            self._resize(self.rows, max(room, min(2 * self.capacity, self.max_capacity)))

    def _resize(self, rows: int, capacity: int) -> None:
        """Move what is in use to buffers of at least these rows and this capacity, unless they have both already."""
        self.capacity = capacity
        written = [layer for layer in self.layers if layer.is_initialized]  # a pipeline stage has some of them
        for layer in written:
            layer.keys = layer.values = None  # else these views would keep every old stack until all have grown
        for stack in chain(*self.stacks):
            stack.resize(rows, capacity, [*map(add, self.lengths, self.pending)])
        for layer in written:
            layer.take_buffers()
        self._buffers = None

    def _check_paths(self, paths: Sequence[Sequence[int] | None]) -> None:
        if len(paths) != self.rows:
            raise CacheError(f"{len(paths)} paths for {self.rows} rows: give one path (or None) a row")
        for row, path in enumerate(paths):
            if path and not all(a < b for a, b in pairwise((-1, *path, self.pending[row]))):
                raise CacheError(f"row {row}: path {list(path)} is not ascending within {self.pending[row]} slots")


def _copy_rows(buffers: Tensor, first: int, others: Tensor, used: Sequence[int]) -> None:
    """Copy the used slots of other buffers' rows into the rows from ``first`` on; touch no others."""
    for row, count in enumerate(used):
        buffers[:, first + row, :, :count] = others[:, row, :, :count]


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Return zeros of a tensor's dtype and device.  On a CPU, pages of memory are not touched before they are used."""
    if like.device.type != "cpu" or not prod(shape):
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(prod(shape) * like.itemsize, np.uint8)).view(like.dtype).view(shape)


@cache  # graphs read it at this address
def _all_rows(count: int, device: torch.device) -> Tensor:
    """Return (count, 1) row numbers."""
    return torch.arange(count, device=device)[:, None]
