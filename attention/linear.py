"""Products of a few states with weights packed once, as compiled passes multiply them on a CPU.

Knows: the packed weights of MKL and oneDNN, how a compiled pass calls them.  Does not know: models, graphs.

`torch.nn.Linear` rearranges a weight in every product.  In float32, MKL's packed products of 1
to 8 states take little longer than reading the weight from memory; oneDNN's take a third to a half longer.  In 16 bits
only oneDNN packs (``docs/performance.md``).
"""

from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}  # the number of states that packing is tuned for

_library = torch.library.Library("specinfer", "DEF")
# states (..., K), a weight (N, K) of which only the shape counts, the weight packed, bias (N,): returns (..., N)
_library.define("linear(Tensor states, Tensor like, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.register_fake("specinfer::linear", lib=_library)
def _shape(states: Tensor, like: Tensor, _packed: Tensor, _bias: Tensor | None) -> Tensor:
    return states.new_empty(*states.shape[:-1], len(like))


def packable(weight: Tensor) -> bool:
    """Whether this machine has packed products for a weight (N, K)."""
    if weight.device.type != "cpu" or weight.ndim != 2 or not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.float32: torch._C.has_mkl,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return bool(supported.get(weight.dtype, False))


@torch.inference_mode()
def pack(weights: Sequence[Tensor]) -> Tensor:
    """Return weights (N_i, K) as one packed weight (sum of N_i, K)."""
    joined = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
    rows = ROWS[joined.dtype]
    if joined.dtype == torch.float32:
        return torch.ops.mkl._mkl_reorder_linear_weight(joined, rows)
    return torch.ops.mkldnn._reorder_linear_weight(joined, rows)


@cache
def teach_compiler() -> None:
    """Tell Inductor how to call a packed product.

    MKL's product takes any number of states, whatever number its weight was packed for.  Torch's operator compares the
    two numbers, so it is given the current one.  New packages are compared with plain passes of many sizes.
    """
    from torch._inductor import ir, mkldnn_ir
    from torch._inductor.lowering import register_lowering, view

    @register_lowering(torch.ops.specinfer.linear, type_promotion_kind=None)
    def lower(states: Any, like: Any, packed: Any, bias: Any) -> Any:
        *before, _ = states.get_size()
        flat = ir.ExternKernel.realize_input(view(states, [-1, states.get_size()[-1]]))
        bias = bias if bias is None else ir.ExternKernel.realize_input(bias)
        if states.get_dtype() == torch.float32:
            flat = ir.ExternKernel.require_contiguous(flat)
            product = mkldnn_ir.MKLPackedLinear.create(flat, packed, like, bias, flat.get_size()[0])
        else:
            product = mkldnn_ir.LinearUnary.create(flat, packed, bias, "none", [], "")
        return view(ir.TensorBox.create(product), [*before, like.get_size()[0]])


def free_bytes() -> float:
    """Return the memory available without swapping, infinite if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return inf
