"""C++ that becomes a part of compiled passes on a CPU: one header for each kernel.

Knows: where the headers are, and what their functions are called.  Does not know: what kernels compute.
"""

from collections.abc import Sequence
from pathlib import Path

from specinfer.attention.torch_private import Size, Value, call_of_header

FOLDER = Path(__file__).parent


def source() -> str:
    """Return the text of all headers: packages that were compiled from others are not used."""
    return "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))


def call(
    header: str,
    function: str,
    inputs: Sequence[Value],
    sizes: Sequence[Size],
    constants: Sequence[float] = (),
    strides: Sequence[Size] | None = None,
) -> Value:
    """Return the value that a function of a header fills, as `call_of_header` does.

    Args:
        header: its name, without ``.h``.
        function: its name after ``aoti_torch_specinfer_``.
        inputs, sizes, constants, strides: as there.
    """
    name = f"aoti_torch_specinfer_{function}"
    return call_of_header(FOLDER / f"{header}.h", name, inputs, sizes, constants, strides)
