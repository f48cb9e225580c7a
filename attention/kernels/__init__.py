"""C++ that becomes a part of compiled passes on a CPU: one header for each kernel.

Knows: how code that Inductor writes calls a function of a header.  Does not know: what kernels compute.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def source() -> str:
    """Return the text of all headers: packages that were compiled from others are not used."""
    return "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))


def call(header: str, function: str, layout: Any, inputs: Sequence[Any], constants: Sequence[Any] = ()) -> Any:
    """Return Inductor's tensor of a layout that a function of a header fills.

    Args:
        header: its name, without ``.h``.
        function: its name after ``aoti_torch_specinfer_``; it takes the result, the inputs, and the constants.
        layout: of the result.
        inputs: Inductor's tensors.
        constants: numbers.
    """
    from torch._inductor import ir

    class Kernel(ir.ExternKernelOut):
        def codegen(self, wrapper: Any) -> None:
            wrapper.include_extra_header(str(FOLDER / f"{header}.h"))
            super().codegen(wrapper)

    name = f"aoti_torch_specinfer_{function}"
    return ir.TensorBox.create(Kernel(layout, inputs, tuple(constants), cpp_kernel_name=name))
