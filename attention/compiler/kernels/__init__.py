"""C++ that becomes a part of compiled passes on a CPU: a header for each kernel, and how compiled code calls it.

Knows: where the headers are, what Inductor makes of our operators.  Does not know: what kernels compute, graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from specinfer.attention.torch_private import (
    Size,
    Value,
    call_of_header,
    contiguous,
    in_memory,
    lowering,
    packed_product,
    reshaped,
    sizes_of,
    with_contiguous_rows,
)

FOLDER = Path(__file__).parent


def source() -> str:
    """Return the text of all headers: packages that were compiled from others are not used."""
    return "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))


@cache
def teach_compiler() -> None:
    """Tell Inductor how to call packed products and our kernels, which become a part of the compiled code.

    Products take any number of states; new packages are compared with plain passes of many sizes.
    """
    operators = torch.ops.specinfer

    @lowering(operators.linear)
    def lower_linear(states: Value, like: Value, packed: Value, bias: Value | None) -> Value:
        *before, size = sizes_of(states)
        product = packed_product(reshaped(states, [-1, size]), packed, like, bias)
        return reshaped(product, [*before, sizes_of(like)[0]])

    @lowering(operators.linear_blocks)
    def lower_blocks(states: Value, packed: Value, outputs: Size, form: str) -> Value:
        return _product("linear.h", f"linear_{'bf16' if form == 'rounded' else form}", states, [packed], outputs)

    @lowering(operators.packed_linear)
    def lower_packed(states: Value, packed: Sequence[Value], outputs: Sequence[Size]) -> Value:
        return _product("packed.h", "packed_linear", states, packed, sum(outputs))

    @lowering(operators.packed_rows)
    def lower_rows(rows: Value, packed: Value, inputs: int) -> Value:
        flat = contiguous(reshaped(rows, [-1]))
        function, given = "aoti_torch_specinfer_packed_rows", [flat, in_memory(packed)]
        found = call_of_header(FOLDER / "packed.h", function, given, [sizes_of(flat)[0], inputs])
        return reshaped(found, [*sizes_of(rows), inputs])

    @lowering(operators.attend)
    def lower_attention(
        queries: Value, keys: Value, values: Value, mask: Value, of_nodes: Value | None, scale: float
    ) -> Value:
        rows, heads, nodes, _ = sizes_of(queries)
        size = sizes_of(values)[3]
        read = map(with_contiguous_rows, (keys, values))  # views of the cache are read where they are
        given = [contiguous(queries), *read, contiguous(mask)]
        given += [] if of_nodes is None else [contiguous(of_nodes)]
        function = f"aoti_torch_specinfer_attend{'' if of_nodes is None else '_packed'}"
        strides = [nodes * heads * size, size, heads * size, 1]
        return call_of_header(FOLDER / "attend.h", function, given, [rows, heads, nodes, size], [scale], strides)


def _product(header: str, function: str, states: Value, matrices: Sequence[Value], outputs: Size) -> Value:
    """Return what a function of a header makes of states (..., K) and matrices with so many outputs, (..., N)."""
    *before, size = sizes_of(states)
    flat = contiguous(reshaped(states, [-1, size]))
    given, shape = [flat, *map(in_memory, matrices)], [sizes_of(flat)[0], outputs]
    product = call_of_header(FOLDER / header, f"aoti_torch_specinfer_{function}", given, shape)
    return reshaped(product, [*before, outputs])
