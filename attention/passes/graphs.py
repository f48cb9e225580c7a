"""Passes that repeat in the same shapes: captured as CUDA graphs, and replayed.

Knows: shapes seen so far, tensors that must stay where a graph reads them.  Does not know: trees, models.

A GPU finishes the many small kernels of a pass over a few tokens faster than a CPU launches them.  A graph launches all
of them at once.  It holds for one set of shapes, so passes use few: a pass attends to a power of two of slots, its rows
are padded (`common_width`), and a graph is of a power of two of rows: those beyond the batch are fed as well, and write
where no row is.

A graph reads and writes one cache.  So caches and their graphs are kept when a session is over, for the next one.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache as remembered
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from specinfer.attention.cache import TreeCache
from specinfer.attention.compiler.watch import Watch, altered
from specinfer.attention.forward import Forward, Outputs
from specinfer.attention.layout import Layout
from specinfer.attention.passes.base import Pass, Result
from specinfer.attention.passes.plain import Padded, TensorPass
from specinfer.attention.torch_private import copy_all
from specinfer.common.memory import free_bytes
from specinfer.common.tensors import on_device, padded_kv_length, padded_rows, padded_width
from specinfer.errors import UnsupportedModel

Tensors = dict[str, Tensor]
Replay = Callable[[], Outputs]
Function = Callable[[Tensors], Outputs]

SEEN = 2  # passes of a shape before it is captured: they warm kernels up, and many shapes come only once
TENSORS = ("tokens", "columns", "visible", "depths", "node_depths")  # of a layout; its rows have as many nodes each
HELD = 1 << 30, 8  # bytes of inputs and outputs that the graphs of one cache hold, or this part of what is free
IDLE = 2  # caches of one model that are kept for sessions to come


class Graphs:
    """Passes over one cache, captured once for every set of shapes; of too many, those used longest ago are dropped.

    Args:
        room: bytes of inputs and outputs that they hold.
    """

    def __init__(self, room: float = HELD[0]) -> None:
        self.room, self.capture = room, CudaCapture()
        self.seen: Counter[Hashable] = Counter()
        self.is_new = False  # whether the shapes of the last pass had no graph yet
        self.made: dict[Hashable, tuple[Tensors, Replay]] = {}  # the one used last is the last one
        self.held: dict[Hashable, int] = {}  # bytes of their inputs and outputs
        self.memory: Hashable = None  # that `made` was captured with
        self.refused: set[Hashable] = set()  # kinds that cannot be captured

    def __call__(
        self, run: Function, tensors: Tensors, memory: Hashable, kind: Hashable = None, rows: int = 1
    ) -> Outputs:
        """Run a pass.

        Args:
            run: the pass, the same in every call of a kind.  It depends on nothing but its tensors, and memory that
                stays.
            tensors: its inputs.
            memory: another one than in the last call drops all graphs.
            kind: of pass.
            rows: of inputs and outputs, whose first dimensions have as many entries for each.  A graph is of
                `padded_rows`; those beyond the pass's are what they were, or copies of the first one.

        Returns:
            what the pass returns; the next one of these shapes may overwrite it.
        """
        if memory != self.memory:
            self.made.clear()
            self.held.clear()
            self.seen.clear()  # kernels have to warm up to the new memory
            self.memory, self.capture = memory, CudaCapture()
        padded = padded_rows(rows)
        shapes = kind, padded, *((name, len(t) // rows, t.shape[1:], t.dtype) for name, t in tensors.items())
        self.seen[shapes] += 1
        self.is_new = shapes not in self.made
        if self.seen[shapes] <= SEEN:
            return run(dict(tensors))
        if self.is_new:
            inputs = {name: _filled(tensor, rows, padded) for name, tensor in tensors.items()}
            self.made[shapes] = inputs, self.capture(run, inputs)
        self.made[shapes] = inputs, replay = self.made.pop(shapes)
        for dtype in {tensor.dtype for tensor in tensors.values()}:  # one launch for all of a type
            names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
            copy_all([inputs[name][: len(tensors[name])] for name in names], [tensors[name] for name in names])
        outputs = replay()
        if self.is_new:
            self.held[shapes] = sum(tensor.nbytes for tensor in (*inputs.values(), *outputs))
            self._make_room()
        return outputs if rows == padded else tuple(output[: len(output) // padded * rows] for output in outputs)

    def _make_room(self) -> None:
        while sum(self.held.values()) > self.room and len(self.made) > 1:
            oldest = next(iter(self.made))
            del self.made[oldest], self.held[oldest]


def _filled(tensor: Tensor, rows: int, padded: int) -> Tensor:
    """Return a tensor of rows, (n * rows, ...), and behind them as many copies of the first one as are missing."""
    return torch.cat([tensor, *[tensor[: len(tensor) // rows]] * (padded - rows)])


class GraphedPass(Pass):
    """Another pass, replayed as graphs where its inputs are tensors.

    Args:
        inner: runs the pass.
        graphs: of the one cache that it is called with.
    """

    def __init__(self, inner: TensorPass, graphs: Graphs) -> None:
        self.inner, self.graphs = inner, graphs

    def cache(self, model: Forward, rows: int, capacity: int, max_capacity: int | None, fixed: bool) -> TreeCache:
        """Return another empty cache of the inner pass."""
        return self.inner.cache(model, rows, capacity, max_capacity, fixed)

    def __call__(self, model: Forward, nodes: Layout, cache: TreeCache, aux_layers: Sequence[int]) -> Result:
        """Feed nodes of rows that are padded to one width, or have as many each; others are not replayed."""
        if nodes.order is None and len({*nodes.sizes}) > 1:
            return self.inner(model, nodes, cache, aux_layers)
        placed = Padded(nodes)
        cache.stage(nodes.sizes, placed.width)
        columns = placed.columns
        wanted = None if columns is None else range(columns[0], columns[-1] + 1)

        def run(given: Tensors) -> Outputs:
            extra = {name: given[name] for name in nodes.extra}
            tokens, of_columns, visible, depths, of_nodes = (given[name] for name in TENSORS)
            rows, width = len(depths), placed.width
            every = None if wanted is None else [wanted] * rows
            of_rows = torch.arange(rows, device=tokens.device)[:, None].expand(-1, width).flatten()
            padded = Layout(tokens, of_rows, of_columns, visible, depths, of_nodes, [width] * rows, every, extra)
            found = self.inner.through(model, padded, self.inner.arranged(padded), cache, aux_layers)
            # also of one row of all nodes
            return tuple(values.reshape(rows, -1, *values.shape[2:]) for values in found)

        extra = {name: placed(values).flatten(0, 1) for name, values in nodes.extra.items()}
        tensors = {**{name: getattr(nodes, name) for name in TENSORS}, **extra}
        outputs = self._replayed(run, tensors, cache, cache.kv_length, (tuple(aux_layers), wanted))
        logits, *states = (output.clone() for output in outputs)
        placed.columns = None if wanted is None else [*wanted]
        return placed.logits(logits), *map(placed.states, states)

    def width(self, size: int) -> int:
        """Return the nodes that rows of this size are padded to: few sizes come."""
        return padded_width(size)

    def several(self, run: Function, tensors: Tensors, cache: TreeCache, slots: int, kind: Hashable) -> Outputs:
        """Run what feeds several passes between two commits, from a graph of all of them if there is one.

        What the passes wrote is forgotten.  What cannot be captured runs as it is.

        Args:
            run: as in `Graphs`; its passes are the inner one's, over rows that have as many nodes each.
            tensors: its inputs.
            cache: that the passes write.
            slots: how many of each row they write at most.
            kind: of run.
        """
        kv_length = cache.room(slots)
        if kind not in self.graphs.refused:
            try:
                return self._replayed(run, tensors, cache, kv_length, kind)
            except UnsupportedModel:  # by what is done between the passes, which may wait for the device
                self.graphs.refused.add(kind)
        with cache.locate(on_device(cache.lengths, next(iter(tensors.values())).device), kv_length):
            return run(dict(tensors))

    def _replayed(self, run: Function, tensors: Tensors, cache: TreeCache, kv_length: int, kind: Hashable) -> Outputs:
        """Run passes that attend to `kv_length` slots, from a graph if there is one; rows' lengths are inputs."""

        def located(given: Tensors) -> Outputs:
            with cache.locate(given["lengths"], kv_length):
                return run(given)

        rows = cache.rows
        cache.make_rows(padded_rows(rows))
        given = {**tensors, "lengths": on_device(cache.lengths, next(iter(tensors.values())).device)}
        outputs = self.graphs(located, given, cache.addresses, (kind, kv_length), rows)
        self.first += self.graphs.is_new
        return outputs


class _Kept(NamedTuple):
    """A cache with its graphs, and who has it now."""

    cache: TreeCache
    graphs: Graphs
    rows: int  # that it had room for when it was made
    inner: TensorPass
    settings: Hashable  # that graphs hold as they were
    watch: Watch
    user: Callable[[], GraphedPass | None]

    def fits(self, model: Forward, inner: TensorPass, settings: Hashable) -> bool:
        """Whether its graphs compute what the model would compute now."""
        same = self.inner is inner and self.settings == settings
        return same and not altered(model.model) and not self.watch.changed(model.model)


class GraphedCaches:
    """The caches of one model that graphs read, in use or idle, the one that was taken last at the end."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self.lock = Lock()

    def take(
        self, model: Forward, inner: TensorPass, rows: int, capacity: int, max_capacity: int | None
    ) -> tuple[TreeCache, GraphedPass]:
        """Return an empty cache, and the pass that replays graphs over it; it is idle again when nobody has the pass.

        Args:
            model: whose passes they are.
            inner: runs the passes.
            rows, capacity, max_capacity: as `TreeCache`.
        """
        settings = inner.weights(model), model.autocast, torch.get_float32_matmul_precision()
        with self.lock:
            busy = [each for each in self.kept if each.user() is not None]
            idle = [each for each in self.kept if each.user() is None and each.fits(model, inner, settings)]
            large = [each for each in idle if each.rows >= rows and each.cache.capacity >= capacity]
            if large:
                found = large[-1]
                found.cache.restart(rows, max_capacity)
            else:
                room = padded_kv_length(capacity)  # for longer texts as well
                cache = inner.cache(model, rows, room, max_capacity, True)
                graphs = Graphs(max(HELD[0], free_bytes(model.device) / HELD[1]))
                found = _Kept(cache, graphs, rows, inner, settings, Watch(model.model), lambda: None)
            graphed = GraphedPass(inner, found.graphs)
            others = [each for each in idle if each is not found]
            self.kept = [*others[-IDLE:], *busy, found._replace(user=ref(graphed))]
        return found.cache, graphed


class CudaCapture:
    """Captures passes on a GPU (`torch.cuda.CUDAGraph`).  Those of one cache share a pool of memory."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, run: Function, inputs: Tensors) -> Replay:
        """Capture a pass over inputs; return what runs it again over the values that they hold then.

        Raises:
            UnsupportedModel: the pass waits for the device, or does something else that a graph cannot hold.
        """
        device = next(iter(inputs.values())).device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # current after a failure
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, self.pool, _stream(device), capture_error_mode="thread_local"):
                    outputs = run(inputs)
            except RuntimeError as error:
                reason = str(error.__context__ or error).splitlines()[0]  # ending a failed capture fails as well
                raise UnsupportedModel(f"a pass cannot be captured ({reason}): leave out graphs") from error

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


@remembered
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device that captures are made in: cuBLAS keeps memory for each stream that it sees."""
    return torch.cuda.Stream(device)
