"""Passes that repeat in the same shapes: captured as CUDA graphs, and replayed.

Knows: shapes seen so far, tensors that must stay where a graph reads them.  Does not know: trees, models.

A GPU finishes the many small kernels of a pass over a few tokens faster than a CPU launches them.  A graph launches all
of them at once.  It holds for one set of shapes, so passes use few: a pass attends to a power of two of slots, and
its rows are padded (`padded_width`).  Later levels of a tree keep their sizes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer.attention.cache import TreeCache
from specinfer.attention.forward import Forward, Inputs, Outputs
from specinfer.attention.layout import Layout
from specinfer.attention.passes.base import Pass, Result
from specinfer.attention.passes.plain import TensorPass
from specinfer.common.tensors import padded_width
from specinfer.errors import UnsupportedModel

Tensors = dict[str, Tensor]
Replay = Callable[[], tuple[Tensor, ...]]
Function = Callable[[Tensors], tuple[Tensor, ...]]

SEEN = 2  # passes of a shape before it is captured: they warm kernels up, and many shapes come only once


class Graphs:
    """A pass, captured once for every set of shapes."""

    def __init__(self) -> None:
        self.capture = CudaCapture()
        self.seen: Counter[Hashable] = Counter()
        self.made: dict[Hashable, tuple[Tensors, Replay]] = {}
        self.memory: Hashable = None  # that `made` was captured with

    def __call__(self, run: Function, tensors: Mapping[str, Tensor], memory: Hashable) -> tuple[Tensor, ...]:
        """Run a pass.

        Args:
            run: the pass, the same in every call.  It depends on nothing but its tensors, and memory that stays.
            tensors: its inputs.
            memory: another one than in the last call drops all graphs.
        """
        if memory != self.memory:
            self.made.clear()
            self.seen.clear()  # kernels have to warm up to the new memory
            self.memory, self.capture = memory, CudaCapture()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        self.seen[shapes] += 1
        if self.seen[shapes] <= SEEN:
            return run(dict(tensors))
        if shapes not in self.made:
            inputs = {name: tensor.clone() for name, tensor in tensors.items()}
            self.made[shapes] = inputs, self.capture(run, inputs)
        inputs, replay = self.made[shapes]
        for name, tensor in tensors.items():
            inputs[name].copy_(tensor)
        return tuple(output.clone() for output in replay())  # the next replay overwrites them


class GraphedPass(Pass):
    """Another pass, replayed as graphs where its inputs are tensors.

    Args:
        inner: runs the pass; a `TensorPass`.
    """

    def __init__(self, inner: Pass) -> None:
        assert isinstance(inner, TensorPass)
        self.inner, self.graphs = inner, Graphs()

    def cache(self, model: Forward, rows: int, capacity: int, max_capacity: int | None, fixed: bool) -> TreeCache:
        """Return an empty cache that graphs can write."""
        return self.inner.cache(model, rows, capacity, max_capacity, True)

    def __call__(self, model: Forward, nodes: Layout, cache: TreeCache, aux_layers: Sequence[int]) -> Result:
        """Feed nodes; rows are padded, but for later levels of a tree, of which a step has several."""
        width = padded_width(max(nodes.sizes)) if nodes.depths.shape[1] == max(nodes.sizes) else 0
        return self.inner.through(self._replay, model, nodes, cache, aux_layers, width)

    def _replay(self, model: Forward, inputs: Inputs, cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run the inner pass, from a graph if there is one for inputs of these shapes."""
        if not isinstance(inputs["attention_mask"], Tensor):  # a mask for each kind of layer
            return self.inner.run(model, inputs, cache, aux_layers)

        def run(given: Tensors) -> Outputs:
            cache.slots = given["slots"]
            others = {name: value for name, value in given.items() if name != "slots"}
            return self.inner.run(model, others, cache, aux_layers)

        return self.graphs(run, {**inputs, "slots": cache.staged(inputs["input_ids"].device)}, cache.capacity)


class CudaCapture:
    """Captures passes on a GPU (`torch.cuda.CUDAGraph`).  They share one stream and one pool of memory."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None

    def __call__(self, run: Function, inputs: Tensors) -> Replay:
        """Capture a pass over inputs; return what runs it again over the values that they hold then.

        Raises:
            UnsupportedModel: the pass waits for the device, or does something else that a graph cannot hold.
        """
        device = next(iter(inputs.values())).device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # current after a failure
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream = self.stream or torch.cuda.Stream(device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, self.pool, self.stream):
                    outputs = run(inputs)
            except RuntimeError as error:
                reason = str(error.__context__ or error).splitlines()[0]  # ending a failed capture fails, too
                raise UnsupportedModel(f"a pass cannot be captured ({reason}): leave out graphs") from error

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay
