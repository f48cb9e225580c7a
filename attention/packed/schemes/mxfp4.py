"""MXFP4: floating point numbers of 4 bits (E2M1) with a power of two for 32 inputs, as gpt-oss has its experts.

Knows: blocks of 32 inputs.  Does not know: files, models, the packed layout.
"""

from collections.abc import Mapping

from torch import Tensor

from specinfer.attention.packed.formats import FP4, half_powers
from specinfer.attention.packed.schemes.base import Expected, Layer, Matrix, Scheme, Settings, fields, group_of

GROUP = 32  # inputs that share a scale
BYTES = ("U8",)
UNUSED = "quant_method", "dequantize"


class Mxfp4Layer(Layer):
    """A matrix (N, K): blocks (N, K / 32, 16), the lower half of a byte first, and exponents (N, K / 32)."""

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        groups = inputs // group_of(GROUP, inputs)
        blocks = Expected(BYTES, (outputs, groups, GROUP // 2))
        return {"blocks": blocks, "scales": Expected(BYTES, (outputs, groups))}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix:
        """See `Layer`."""
        blocks = found["blocks"].flatten(1)
        return Matrix(4, GROUP, lambda rows: fields(blocks[rows], 4), half_powers(found["scales"]), None, None, FP4)


def mxfp4(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED)
    return Scheme(given.unless("modules_to_not_convert", Mxfp4Layer()), packs=True)
