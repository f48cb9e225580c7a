"""Linear layers in the layout that a CPU multiplies fastest, while the engine's passes run.

Knows: oneDNN's packed weights for bfloat16 on CPUs.  Does not know: models' architectures, trees, caches.

On a CPU, `torch.nn.Linear` reads its weight as it lies, and in bfloat16 each product rearranges it again.  Packed once
(what `torch.compile` calls freezing), a pass of SmolLM2-135M over 12 nodes took 42 instead of 60 ms on two cores of an
AMD EPYC with AVX512-BF16 (``benchmarks/passes.py``).  The packed copy takes as much memory as the weights, so models
that would fill the machine are left alone.  Between passes the model is as it was.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

ROWS = 16  # the number of rows that packing is tuned for
SPARE = 2.0  # free memory that packing asks for, in bytes per byte of weights


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
        self.layers: list[nn.Linear] = []
        if _supported():
            self.layers = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
        if sum(layer.weight.nbytes for layer in self.layers) * SPARE > _free_bytes():
            self.layers = []
        self.stamps: list[tuple[int, int]] = []  # of the weights as they were packed
        self.forwards: list[Callable[[Tensor], Tensor]] = []

    def refresh(self) -> None:
        """Pack layers whose weights are new or have changed since."""
        if [_stamp(layer.weight) for layer in self.layers] != self.stamps:
            self.layers = [layer for layer in self.layers if _is_plain(layer)]  # moved or cast ones are no longer
            self.forwards = [_packed(layer) for layer in self.layers]
            self.stamps = [_stamp(layer.weight) for layer in self.layers]

    def __enter__(self) -> None:
        for layer, forward in zip(self.layers, self.forwards, strict=False):  # none before `refresh`
            layer.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)


def _supported() -> bool:
    """Whether this build of torch has oneDNN's packed products and this CPU multiplies bfloat16."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _is_plain(layer: nn.Linear) -> bool:
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    return layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu"


@torch.inference_mode()
def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
    return partial(_product, weight, layer.bias)


def _product(weight: Tensor, bias: Any, states: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


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
