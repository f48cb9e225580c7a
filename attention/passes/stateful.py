"""States of models that cannot take a token back: each row keeps the cache that the model makes itself, and chains.

Knows: copies of these caches, which tokens a row's cache has read, which of them were committed; what modules hold.
Does not know: models, masks, trees that branch.

A recurrent or convolutional layer folds all tokens into one state.  So a token has no siblings, and rejected tokens
cannot be dropped.  A row's cache is therefore copied before a step's pass, at the *boundary*, and a commit either

    keeps it    if all tokens of the pass were kept (always so without drafts), or
    rolls back  to the copy; the tokens that were kept are read again at the start of the next pass (the *replay*)

Exact by construction: every state results from the committed tokens alone.  All layers of an unmodified model read the
same tokens, so keys and values of replayed tokens are rolled back and written again with the states.  Caches replace
keys and values when they grow, so copies share them; only states are copied.

A replay widens the next pass and needs no pass of its own.  But the states within a pass cannot be kept, so the replay
grows with every rejection in a row: one of more than `REPLAY` tokens is read in a pass of its own.

Each row runs alone, a batch of one: a state cannot skip padding, and rows replay different numbers of tokens.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from specinfer.attention.forward import Forward, Inputs, returned_cache
from specinfer.attention.layout import Layout, PerNode
from specinfer.attention.passes.base import Pass, Result
from specinfer.common.tensors import on_device
from specinfer.errors import CacheError, UnsupportedModel

REPLAY = 16  # the most tokens that the next step's pass reads again
CACHES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
REPLACED = {"keys", "values"}  # tensors that caches replace instead of writing into them

# tokens, how many came before, the row's cache, columns (C,) -> logits (1, C, V), hidden states (1, T, K, H), cache
Found = tuple[Tensor, Tensor | None, object]
Read = Callable[[Sequence[int], int, object, Tensor], Found]


class StateCache:
    """The caches of a batch of rows that grow chains; it takes the place of a `TreeCache`.

    Args:
        rows: sequences in the batch.
        max_capacity: the most tokens a row may ever hold, pending ones included.
    """

    def __init__(self, rows: int, max_capacity: int) -> None:
        if rows < 1:
            raise CacheError(f"a cache needs at least one row, not {rows}")
        self.rows = [_Row() for _ in range(rows)]
        self.max_capacity = max_capacity

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.committed for row in self.rows]

    def feed(self, nodes: Layout, read: Read) -> Result:
        """Read a layout of chains, row by row, each after its replay.

        Args:
            nodes: the layout.
            read: runs the model on one row.

        Returns:
            logits and hidden states, if there are any.

        Raises:
            CacheError: the layout branches, or a row would hold more than ``max_capacity`` tokens.
        """
        if bool((nodes.node_depths != nodes.columns).any()):
            raise CacheError("a tree that branches was fed to a model that keeps states: use chains")
        device, tokens, outputs = nodes.tokens.device, iter(nodes.tokens.tolist()), []
        for number, (row, size) in enumerate(zip(self.rows, nodes.sizes, strict=True)):
            if row.committed + len(row.fed) + size > self.max_capacity:
                advice = "shorten the prompt, ask for fewer new tokens, or use a shorter chain"
                raise CacheError(f"a row needs more than its maximum of {self.max_capacity} tokens: {advice}")
            wanted = range(size) if nodes.wanted is None else nodes.wanted[number]
            columns = torch.arange(wanted.start, wanted.stop, device=device)
            outputs.append(row.feed([*islice(tokens, size)], columns, read) if size else ())
        kinds = range(max(map(len, outputs)))  # logits, and maybe states
        return tuple(PerNode.of_rows([found[kind] if found else None for found in outputs]) for kind in kinds)

    def keep(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Commit the first pending tokens of every row, ``paths[b]`` = 0, 1, ...; None retires a row.

        Raises:
            CacheError: a path is not the beginning of the row's chain.
        """
        if len(paths) != len(self.rows):
            raise CacheError(f"{len(paths)} paths for {len(self.rows)} rows: give one path (or None) a row")
        for number, (row, path) in enumerate(zip(self.rows, paths, strict=True)):
            if path and [*path] != [*range(min(len(path), len(row.fed)))]:
                raise CacheError(f"row {number}: path {[*path]} does not begin a chain of {len(row.fed)} tokens")
        for row, path in zip(self.rows, paths, strict=True):
            row.keep(len(path or ()))
        self.rows = [row for row, path in zip(self.rows, paths, strict=True) if path is not None]

    def join(self, other: "StateCache") -> None:
        """Take in the rows of another cache, after the own ones."""
        self.rows += other.rows
        self.max_capacity = max(self.max_capacity, other.max_capacity)

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the keys of every row are those of the tokens that its cache has read."""
        for number, row in enumerate(self.rows):
            for layer in getattr(row.cache, "layers", ()):
                full = type(layer) is DynamicLayer and layer.keys is not None
                if full and (held := layer.keys.shape[-2]) != row.length:
                    raise CacheError(f"row {number}: a layer holds {held} tokens where {row.length} were read")


class StatefulPass(Pass):
    """Calls the model row by row, each over the cache that the model made for it."""

    def cache(self, model: Forward, rows: int, capacity: int, max_capacity: int | None, fixed: bool) -> StateCache:
        """Return empty caches."""
        return StateCache(rows, max(capacity, max_capacity or 0))

    def __call__(self, model: Forward, nodes: Layout, cache: StateCache, aux_layers: Sequence[int]) -> Result:
        """Feed nodes, which are chains."""

        def read(tokens: Sequence[int], first: int, row: object, columns: Tensor) -> Found:
            inputs: Inputs = {"input_ids": on_device([[*tokens]], columns.device), model.cache_name: row}
            if model.takes_positions:
                positions = torch.arange(first, first + len(tokens), device=columns.device)[None]
                inputs["position_ids"] = positions.clamp(max=(model.max_positions or sys.maxsize) - 1)
            if model.takes_logits_to_keep:
                inputs["logits_to_keep"] = columns
            output, *states = model.call(inputs, aux_layers)
            if (left := returned_cache(output)) is None:
                raise UnsupportedModel(f"{model.name} returns no cache of what it read, so nothing can be taken back")
            logits = output.logits if model.takes_logits_to_keep else output.logits[:, columns]
            return logits, states[0] if states else None, left

        return cache.feed(nodes, read)


class _Row:
    """One row: the model's cache after ``length`` tokens, and the tokens not yet committed or not yet in it."""

    def __init__(self) -> None:
        self.cache: object = None  # which the model makes in its first pass
        self.length = 0
        self.boundary: tuple[object, int] | None = None  # cache and length before the pending tokens
        self.replay: list[int] = []  # committed, after the boundary
        self.fed: list[int] = []  # pending

    @property
    def committed(self) -> int:
        return (self.boundary[1] if self.boundary else self.length) + len(self.replay)

    def feed(self, tokens: list[int], wanted: Tensor, read: Read) -> tuple[Tensor, ...]:
        """Read more pending tokens; return logits (C, V) and hidden states (T, K, H), without those of the replay."""
        if self.boundary is None:
            if len(self.replay) > REPLAY:
                self._read(self.replay, wanted.new_zeros(1), read)
                self.replay = []
            self.boundary = copied(self.cache), self.length
        again = [] if self.fed else self.replay
        logits, states = self._read([*again, *tokens], wanted + len(again), read)
        self.fed += tokens
        return (logits[0],) if states is None else (logits[0], states[0, len(again) :])

    def keep(self, count: int) -> None:
        """Commit this many pending tokens."""
        if self.boundary is not None and count == len(self.fed):
            self.replay = []
        elif self.boundary is not None:
            self.cache, self.length = self.boundary
            self.replay = self.replay + self.fed[:count]
        self.boundary, self.fed = None, []

    def _read(self, tokens: list[int], wanted: Tensor, read: Read) -> tuple[Tensor, Tensor | None]:
        logits, states, self.cache = read(tokens, self.length, self.cache, wanted)
        self.length += len(tokens)
        return logits, states


def copied(value: object, name: str = "") -> object:
    """Return a copy of a model's cache that later passes do not change; it shares keys and values (see above)."""
    if isinstance(value, Tensor):
        return value if name in REPLACED else value.clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if not isinstance(value, CACHES):
        return value
    twin = copy(value)
    for attribute, part in vars(value).items():
        setattr(twin, attribute, copied(part, attribute))
    return twin


def held(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return copies of what modules hold besides weights: floating-point buffers, attributes, and their parts."""
    found = [tensor for module in modules for tensor in tensors({**vars(module), "_parameters": {}})]
    return [tensor.clone() for tensor in found if tensor.is_floating_point() and not tensor.is_meta]


def tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors in a model's cache."""
    if isinstance(value, Tensor):
        yield value
        return
    parts = vars(value) if isinstance(value, CACHES) else value
    if isinstance(parts, dict | list | tuple):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from tensors(part)
