"""C++ that becomes a part of compiled passes on a CPU: one header for each kernel.

Knows: where the headers are.  Does not know: what kernels compute.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def source() -> str:
    """Return the text of all headers: packages that were compiled from others are not used."""
    return "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))
