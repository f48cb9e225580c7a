"""Products with packed matrices: the compiled library, made once on each machine, or else torch on their numbers.

Knows: how the library is called.  Does not know: the layout, modules, models.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.attention.packed.formats import numbers
from specinfer.attention.packed.layout import BLOCK, blocks_of, outputs_of, unpack
from specinfer.common import native

SOURCE = Path(__file__).with_name("products.cpp")
INCLUDED = SOURCE.parents[1] / "compiler" / "kernels" / "tiles.h"

_operators = torch.library.Library("specinfer", "FRAGMENT")
# states (..., K), packed matrices (N_i, K), their N_i, the last one or fewer: returns (..., sum of N_i), float32
_operators.define("packed_linear(Tensor states, Tensor[] packed, SymInt[] outputs) -> Tensor")
# rows (...) of a packed matrix (N, K), K: returns (..., K), float32
_operators.define("packed_rows(Tensor rows, Tensor packed, int inputs) -> Tensor")


@torch.library.register_fake("specinfer::packed_linear", lib=_operators)
def _shape_linear(states: Tensor, _packed: Sequence[Tensor], outputs: Sequence[int]) -> Tensor:
    return states.new_empty(*states.shape[:-1], sum(outputs), dtype=torch.float32)


@torch.library.register_fake("specinfer::packed_rows", lib=_operators)
def _shape_rows(rows: Tensor, _packed: Tensor, inputs: int) -> Tensor:
    return rows.new_empty(*rows.shape, inputs, dtype=torch.float32)


def linear(states: Tensor, packed: Sequence[Tensor], outputs: Sequence[int]) -> Tensor:
    """Multiply states (..., K) with the transposes of packed matrices (N_i, K): (..., sum of N_i), float32.

    The last N may be less than its matrix has: then its first outputs are meant.
    """
    inputs, given = states.shape[-1], states.float().contiguous()
    if (products := library()) is None:
        parts = (numbers(part) for matrix in packed for part in unpack(matrix, inputs))
        return torch.cat([functional.linear(given, part) for part in parts], -1)[..., : sum(outputs)]
    found = given.new_empty(*states.shape[:-1], sum(outputs))
    matrices = (ctypes.c_void_p * len(packed))(*(matrix.data_ptr() for matrix in packed))
    sizes = given.numel() // inputs, inputs, sum(outputs)
    products.specinfer_packed_linear(given.data_ptr(), matrices, len(packed), found.data_ptr(), *sizes)
    return found


def rows_of(rows: Tensor, packed: Tensor, inputs: int) -> Tensor:
    """Return rows (...) of a packed matrix (N, K), K inputs: (..., K), float32.

    Raises:
        IndexError: there is no such row.
    """
    given, products, count = rows.contiguous(), library(), outputs_of(packed)
    if ((given < 0) | (given >= count)).any():
        raise IndexError(f"rows {given.min()} to {given.max()} of a matrix of {count} rows")
    if products is None and given.numel():
        chosen, index = (given // BLOCK).unique(return_inverse=True)
        return numbers(blocks_of(packed, inputs, chosen))[BLOCK * index + given % BLOCK]
    found = torch.empty(*rows.shape, inputs)
    if products is not None:
        products.specinfer_packed_rows(given.data_ptr(), packed.data_ptr(), found.data_ptr(), given.numel(), inputs)
    return found


@contextmanager
def wide_states() -> Iterator[None]:
    """Round states to 16 bits in all products of this thread: a comparison of passes needs more than 8."""
    if (products := library()) is None:
        yield
        return
    before = products.specinfer_wide_states(True)
    try:
        yield
    finally:
        products.specinfer_wide_states(before)


_operators.impl("packed_linear", linear, "CPU")
_operators.impl("packed_rows", rows_of, "CPU")


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled products; None without a compiler."""
    if (found := native.library(SOURCE, INCLUDED)) is None:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    found.specinfer_packed_linear.argtypes = [address, address, number, address, number, number, number]
    found.specinfer_packed_rows.argtypes = [address, address, address, number, number]
    found.specinfer_wide_states.argtypes, found.specinfer_wide_states.restype = [ctypes.c_bool], ctypes.c_bool
    return found


def is_x86() -> bool:
    """Whether this is an x86 processor with AVX2 at least, for whose registers products are written first of all."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")
