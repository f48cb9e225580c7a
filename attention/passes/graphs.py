"""Passes that repeat in the same shapes: captured as CUDA graphs, and replayed.

Knows: shapes seen so far, tensors that must stay where a graph reads them.  Does not know: trees, models, caches.

A GPU finishes the many small kernels of a pass over a few tokens faster than a CPU launches them.  A graph launches all
of them at once.  It holds for one set of shapes, so passes use few: a pass attends to a power of two of slots, and if
nothing follows it in its step, its tokens are padded (`padded_width`).  Levels of a tree keep their sizes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from specinfer.errors import UnsupportedModel

Tensors = dict[str, Tensor]
Replay = Callable[[], tuple[Tensor, ...]]
Pass = Callable[[Tensors], tuple[Tensor, ...]]

FEWEST = 512  # the fewest slots that it attends to; masked slots cost little
SEEN = 2  # passes of a shape before it is captured: they warm kernels up, and many shapes come only once


def padded_kv_length(slots: int) -> int:
    """Return the number of slots attended to by a pass that needs so many."""
    return max(FEWEST, 1 << (slots - 1).bit_length())


class Graphs:
    """A pass, captured once for every set of shapes.

    Args:
        run: the pass.  It must depend on nothing but its tensors, and memory that does not move.
    """

    def __init__(self, run: Pass) -> None:
        self.run, self.capture = run, CudaCapture()
        self.seen: Counter[Hashable] = Counter()
        self.made: dict[Hashable, tuple[Tensors, Replay]] = {}
        self.memory: Hashable = None  # that `made` was captured with

    def __call__(self, tensors: Mapping[str, Tensor], memory: Hashable) -> tuple[Tensor, ...]:
        """Run the pass.  Another ``memory`` than in the last call drops all graphs."""
        if memory != self.memory:
            self.made.clear()
            self.seen.clear()  # kernels have to warm up to the new memory
            self.memory, self.capture = memory, CudaCapture()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        self.seen[shapes] += 1
        if self.seen[shapes] <= SEEN:
            return self.run(dict(tensors))
        if shapes not in self.made:
            inputs = {name: tensor.clone() for name, tensor in tensors.items()}
            self.made[shapes] = inputs, self.capture(self.run, inputs)
        inputs, replay = self.made[shapes]
        for name, tensor in tensors.items():
            inputs[name].copy_(tensor)
        return tuple(output.clone() for output in replay())  # the next replay overwrites them


class CudaCapture:
    """Captures passes on a GPU (`torch.cuda.CUDAGraph`).  They share one stream and one pool of memory."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None

    def __call__(self, run: Pass, inputs: Tensors) -> Replay:
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
