"""Passes that come again in the same shapes: captured as CUDA graphs, and replayed.

Knows: which shapes were met, tensors that must lie where a graph reads them.  Does not know: trees, models, caches.

A GPU is done with the many small kernels of a pass over a few tokens before a CPU has launched them; a graph launches
them all at once.  It holds for one set of shapes, so passes come in few: a pass attends to a power of two of slots, and
where nothing follows it in its step its tokens are padded (`padded_width`); levels of a tree have sizes of their own.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from specinfer.errors import UnsupportedModel

Tensors = dict[str, Tensor]
Pass = Callable[[Tensors], tuple[Tensor, ...]]
Capture = Callable[[Pass, Tensors], Callable[[], tuple[Tensor, ...]]]

NARROWEST = 8  # tokens that a padded pass has at least
FEWEST = 512  # slots that it attends to at least: masked ones cost little
SEEN = 2  # passes of a shape before it is captured: they warm kernels up, and few shapes come but once


def size_bucket(size: int) -> int:
    """Return the least of the sizes that passes may have, four in every octave, that is no smaller."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def padded_width(tokens: int) -> int:
    """Return how many tokens a pass over so many is padded to."""
    return size_bucket(max(tokens, NARROWEST))


def padded_kv_length(slots: int) -> int:
    """Return how many slots a pass attends to that needs so many."""
    return max(FEWEST, 1 << (slots - 1).bit_length())


class Graphs:
    """A pass, captured once for every set of shapes.

    Args:
        run: the pass: a function of its tensors alone, and of memory that stays where it is.
        recorder: makes what records the pass over tensors, and returns what runs it again over what they hold then.
    """

    def __init__(self, run: Pass, recorder: Callable[[], Capture] | None = None) -> None:
        self.run, self.recorder = run, recorder or CudaCapture
        self.capture = self.recorder()
        self.seen: Counter[Hashable] = Counter()
        self.made: dict[Hashable, tuple[Tensors, Callable[[], tuple[Tensor, ...]]]] = {}
        self.memory: Hashable = None  # what `made` was captured over

    def __call__(self, tensors: Mapping[str, Tensor], memory: Hashable) -> tuple[Tensor, ...]:
        """Run the pass; graphs that were captured while ``memory`` was another are dropped."""
        if memory != self.memory:
            self.made.clear()
            self.seen.clear()  # kernels have to warm up to the new memory
            self.memory, self.capture = memory, self.recorder()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        self.seen[shapes] += 1
        if self.seen[shapes] <= SEEN:
            return self.run(dict(tensors))
        if shapes not in self.made:
            places = {name: tensor.clone() for name, tensor in tensors.items()}
            self.made[shapes] = places, self.capture(self.run, places)
        places, replay = self.made[shapes]
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
        return tuple(output.clone() for output in replay())  # the next replay overwrites them


class CudaCapture:
    """Captures passes on a GPU (`torch.cuda.CUDAGraph`), on one stream and in one pool of memory: they share both."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None

    def __call__(self, run: Pass, places: Tensors) -> Callable[[], tuple[Tensor, ...]]:
        """Capture a pass.

        Raises:
            UnsupportedModel: it waits for the device, or does what else a graph cannot hold.
        """
        device = next(iter(places.values())).device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # to it a failure returns
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream = self.stream or torch.cuda.Stream(device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, self.pool, self.stream):
                    outputs = run(places)
            except RuntimeError as error:
                reason = str(error.__context__ or error).splitlines()[0]  # ending a capture that failed fails, too
                raise UnsupportedModel(f"a pass cannot be captured ({reason}): leave out graphs") from error

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay
