"""Linear layers in the layout that a CPU multiplies fastest, while the engine's passes run.

Knows: oneDNN's packed weights for bfloat16 on CPUs, which layers read the same states.  Does not know: trees, caches.

On a CPU, `torch.nn.Linear` reads its weight as it lies, and in bfloat16 each product rearranges it again.  Packed once
(what `torch.compile` calls freezing), a pass over a few tokens takes three quarters of the time or less
(``docs/performance.md``, which counts packing and `streamlined` together).  The packed copy takes as much memory as the
weights, so models that would fill the machine are left alone.  Layers that read the same states (queries, keys and
values; gate and up) become one product, for each has a cost of its own, and whole decoder layers one function where
their kind is known (`streamlined`).  Between passes the model is as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.attention.streamlined import FAMILY, Repeated, streamlined

ROWS = 16  # the number of rows that packing is tuned for
SPARE = 2.0  # free memory that packing asks for, in bytes per byte of weights
SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module that read the same states

Forward = Callable[[Tensor], Tensor]  # a layer's

_MADE: WeakKeyDictionary[nn.Module, "PackedLinears"] = WeakKeyDictionary()


def packed(model: nn.Module) -> "PackedLinears":
    """Return a model's packed layers: one copy, however many decoders share the model."""
    if model not in _MADE:
        _MADE[model] = PackedLinears(model)
    return _MADE[model]


class PackedLinears:
    """A model's linear layers, packed; as a context manager, the model uses them inside.

    Args:
        model: any module.  Only exact `torch.nn.Linear` layers in bfloat16 on a CPU are packed, whose ``forward`` is
            their class's: quantised, adapted or hooked layers compute something else.
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups = list(_groups(model)) if _supported() else []
        if sum(layer.weight.nbytes for layer in self.layers) * SPARE > _free_bytes():
            self.groups = []
        self.decoders = [module for module in model.modules() if type(module) in FAMILY]
        self.stamps: list[tuple[int, int]] = []  # of weights and biases as they were packed
        self.products: dict[nn.Module, Forward] = {}  # by the first layer of a group
        self.linears: list[tuple[nn.Module, Forward]] = []  # what packed layers run
        self.forwards: list[tuple[nn.Module, Callable[..., Any]]] = []  # what modules run inside
        self.users = 0  # `with` blocks under way: the model is packed in the outermost

    @property
    def layers(self) -> list[nn.Linear]:
        """The layers that are packed."""
        return [layer for group in self.groups for layer in group]

    def __enter__(self) -> None:
        if not self.users:
            for module, forward in self.forwards:
                module.__dict__.setdefault("forward", forward)
        self.users += 1

    def __exit__(self, *_error: object) -> None:
        self.users -= 1
        if not self.users:
            for module, forward in self.forwards:
                if module.__dict__.get("forward") is forward:
                    del module.__dict__["forward"]

    def refresh(self) -> None:
        """Pack layers whose weights are new or have changed, and look which modules still do what their class says."""
        if self.users:
            return
        if self._stamps() != self.stamps:
            self.groups = [group for group in self.groups if all(map(_is_plain, group))]  # not moved, not cast
            self.products = {group[0]: _packed(group) for group in self.groups}
            parts = ((group, _forwards(group, self.products[group[0]])) for group in self.groups)
            self.linears = [pair for group, forwards in parts for pair in zip(group, forwards, strict=True)]
            self.stamps = self._stamps()
        masks = Repeated()
        whole = ((decoder, streamlined(decoder, self.products, masks)) for decoder in self.decoders)
        every = (*whole, *self.linears)
        self.forwards = [(m, own) for m, own in every if own is not None and "forward" not in m.__dict__]

    def _stamps(self) -> list[tuple[int, int]]:
        return [_stamp(each) for layer in self.layers for each in (layer.weight, layer.bias) if each is not None]


@torch.inference_mode()
def _packed(layers: Sequence[nn.Linear]) -> Forward:
    """Return the product of layers that share their input, side by side."""
    weights = tuple(layer.weight for layer in layers)
    biases = tuple(layer.bias for layer in layers if layer.bias is not None)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), ROWS)
    return partial(_product, weight, torch.cat(biases) if biases else None)


def _forwards(layers: Sequence[nn.Linear], multiply: Forward) -> list[Forward]:
    """Return what each of the layers is to run instead of its own ``forward``."""
    return [multiply] if len(layers) == 1 else Shared(multiply, [layer.out_features for layer in layers]).forwards


def _product(weight: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


class Shared:
    """One product for layers that read the same states: the first one asked multiplies for all.

    Args:
        multiply: states (..., in) to the outputs of all layers, (..., sum of sizes).
        sizes: of the layers' outputs.
    """

    def __init__(self, multiply: Forward, sizes: list[int]) -> None:
        self.multiply, self.sizes = multiply, sizes
        self.forwards: list[Forward] = [partial(self._part, place) for place in range(len(sizes))]
        self.states: Tensor | None = None  # what the parts were made of
        self.parts: dict[int, Tensor] = {}  # that were not asked for yet

    def _part(self, place: int, states: Tensor) -> Tensor:
        """Return one layer's output."""
        if states is not self.states or place not in self.parts:
            self.states = states
            self.parts = dict(enumerate(torch.split_with_sizes(self.multiply(states), self.sizes, -1)))
        part = self.parts.pop(place)
        if not self.parts:
            self.states = None  # nothing is kept from pass to pass
        return part


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield a model's plain layers, those that share their input together."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in SHARING:
            group = [child for name, child in module.named_children() if name in names and _is_plain(child)]
            if len(group) == len(names) and len({layer.bias is None for layer in group}) == 1:
                grouped.update(group)
                yield group
    yield from ([module] for module in model.modules() if module not in grouped and _is_plain(module))


def _supported() -> bool:
    """Whether this build of torch has oneDNN's packed products and this CPU multiplies bfloat16."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    return layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu"


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Return what changes when a weight is replaced or written in place."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _free_bytes() -> float:
    """Return the memory that can be had without swapping; unbounded where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return inf
