"""Floating point numbers of few bits: FP8, as DeepSeek and Qwen publish it, and MXFP4, as gpt-oss has its experts.

Knows: blocks and their scales.  Does not know: files, models, the packed layout.

    FP8       8 bits (E4M3) with a scale for each block, or for a whole matrix.  Their products with scales are no
              integers of 8 bits, so the packed layout does not hold them: they become numbers
    MXFP4     4 bits (E2M1) with a power of two for 32 inputs
"""

from collections.abc import Mapping

from torch import Tensor

from specinfer.attention.packed.formats import FP4, half_powers
from specinfer.attention.packed.schemes.base import FLOATS, Expected, Layer, Matrix, Scheme, Settings, fields, group_of
from specinfer.errors import ModelError

GROUP = 32  # inputs that share a power of two
BYTES = ("U8",)
UNUSED_OF_FP8 = "quant_method", "dequantize", "activation_scheme"  # states keep their numbers
UNUSED_OF_MXFP4 = "quant_method", "dequantize"


class ScaledLayer(Layer):
    """A matrix (N, K) of numbers of 8 bits.

    Args:
        block: outputs and inputs that share a scale, 0 for all of them.
        name: the scales' last part.
    """

    def __init__(self, block: tuple[int, int], name: str) -> None:
        self.block, self.name = block, name

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        rows, columns = self.block
        shape = (-(-outputs // (rows or outputs)), -(-inputs // (columns or inputs)))
        return {"weight": Expected(("F8_E4M3",), (outputs, inputs)), self.name: Expected(FLOATS, shape)}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """See `Layer`."""
        rows, columns = self.block
        scales = found[self.name].float()
        if not scales.isfinite().all():
            raise ModelError("a scale is not a number, so texts would be wrong: get the file again")
        scales = scales.repeat_interleave(rows or outputs, 0)[:outputs]
        return found["weight"].float() * scales.repeat_interleave(columns or inputs, 1)[:, :inputs]


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


def fp8(given: Settings) -> Scheme:
    """Return what a configuration says.

    Raises:
        ModelError: blocks have no two sizes.
    """
    given.forget(UNUSED_OF_FP8)
    given.choose("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    given.choose("scale_fmt", ["float", "ue8m0"], "float")  # the dtype of scales says it
    block = given.get("weight_block_size", list, [0, 0])
    if len(block) != 2 or not all(type(size) is int and size >= 0 for size in block):
        raise ModelError(f"its quantization_config says weight_block_size {block!r:.40}, and should say two sizes")
    ignored = "modules_to_not_convert" if "modules_to_not_convert" in given else "ignored_layers"
    layer = given.unless(ignored, ScaledLayer((block[0], block[1]), "weight_scale_inv"))
    return Scheme(layer, packs=False, unused=frozenset({"input_scale", "activation_scale"}))


def mxfp4(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED_OF_MXFP4)
    return Scheme(given.unless("modules_to_not_convert", Mxfp4Layer()), packs=True)
