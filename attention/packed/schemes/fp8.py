"""Floating point numbers of 8 bits (E4M3) with a scale for each block, as DeepSeek and Qwen publish them.

Knows: blocks, and a scale for a whole matrix.  Does not know: files, models.

Their products with scales are no integers of 8 bits, so the packed layout does not hold them: they become numbers.
"""

from collections.abc import Mapping

from torch import Tensor

from specinfer.attention.packed.schemes.base import FLOATS, Expected, Layer, Scheme, Settings
from specinfer.errors import ModelError

E4M3 = ("F8_E4M3",)
UNUSED = "quant_method", "dequantize", "activation_scheme"  # states keep their numbers


class ScaledLayer(Layer):
    """A matrix (N, K) of numbers of a few bits.

    Args:
        block: outputs and inputs that share a scale, 0 for all of them.
        name: the scales' last part.
        dtypes: of the numbers, as safetensors name them.
    """

    def __init__(self, block: tuple[int, int], name: str, dtypes: tuple[str, ...] = E4M3) -> None:
        self.block, self.name, self.dtypes = block, name, dtypes

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        rows, columns = self.block
        shape = (-(-outputs // (rows or outputs)), -(-inputs // (columns or inputs)))
        return {"weight": Expected(self.dtypes, (outputs, inputs)), self.name: Expected(FLOATS, shape)}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """See `Layer`."""
        rows, columns = self.block
        scales = found[self.name].float()
        if not scales.isfinite().all():
            raise ModelError("a scale is not a number, so texts would be wrong: get the file again")
        scales = scales.repeat_interleave(rows or outputs, 0)[:outputs]
        return found["weight"].float() * scales.repeat_interleave(columns or inputs, 1)[:, :inputs]


def fp8(given: Settings) -> Scheme:
    """Return what a configuration says.

    Raises:
        ModelError: blocks have no two sizes.
    """
    given.forget(UNUSED)
    given.choose("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    given.choose("scale_fmt", ["float", "ue8m0"], "float")  # the dtype of scales says it
    block = given.get("weight_block_size", list, [0, 0])
    if len(block) != 2 or not all(type(size) is int and size >= 0 for size in block):
        raise ModelError(f"its quantization_config says weight_block_size {block!r:.40}, and should say two sizes")
    ignored = "modules_to_not_convert" if "modules_to_not_convert" in given else "ignored_layers"
    layer = given.unless(ignored, ScaledLayer((block[0], block[1]), "weight_scale_inv"))
    return Scheme(layer, packs=False, unused=frozenset({"input_scale", "activation_scale"}))
