"""GPTQ: 4 or 8 bits, neighbouring inputs in a word, in groups that may be scattered ("act-order").

Knows: both versions of the format.  Does not know: files, models, the packed layout.
"""

from collections.abc import Mapping

from torch import Tensor

from specinfer.attention.packed.schemes.base import (
    FLOATS,
    WIDTHS,
    WORD,
    Expected,
    Layer,
    Matrix,
    Scheme,
    Settings,
    fields,
    group_of,
    order_of,
)
from specinfer.errors import ModelError

FORMATS = "gptq", "gptq_v2"  # zero points are stored less one, or as they are
# how matrices were found, and by which program; tensors say which layers are quantised, and in which order
UNUSED = (
    *("quant_method", "quantizer", "quant_algo", "method", "meta", "sym", "static_groups", "true_sequential"),
    *("damp_percent", "damp_auto_increment", "act_group_aware", "mse", "dataset", "tokenizer", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "batch_size", "pad_token_id", "max_input_length", "lm_head"),
    *("cache_block_outputs", "modules_in_block_to_quantize", "block_name_to_quantize", "pack_dtype", "dynamic"),
    *("module_name_preceding_first_block", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
    *("max_exllama_size", "backend", "is_marlin_format", "uses_exllama"),
)


class GptqLayer(Layer):
    """A matrix (N, K): words (K x bits / 32, N), zero points in words (K / group, N x bits / 32)."""

    def __init__(self, bits: int, group: int, less: int, ordered: bool) -> None:
        self.bits, self.group, self.less, self.ordered = bits, group, less, ordered

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        groups, shared = inputs // group_of(self.group, inputs), WORD // self.bits
        if outputs % shared:
            raise ModelError(f"words of {shared} zero points cannot hold {outputs}: another program made the file")
        return {
            "qweight": Expected(("I32",), (inputs // shared, outputs)),
            "qzeros": Expected(("I32",), (groups, outputs // shared)),
            "scales": Expected(FLOATS, (groups, outputs)),
            "g_idx": Expected(("I32",), (inputs,), optional=not self.ordered),
        }

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix:
        """See `Layer`."""
        group = group_of(self.group, inputs)
        zeros = fields(found["qzeros"], self.bits).short() + self.less
        if (zeros >> self.bits).any():
            what = f"a zero point is stored as {(1 << self.bits) - 1}, which programs read as 0 or as {1 << self.bits}"
            raise ModelError(f"{what}: take a checkpoint of format gptq_v2")
        order = order_of(found.get("g_idx"), inputs, group)

        def integers(rows: slice) -> Tensor:
            return fields(found["qweight"][:, rows].T, self.bits)

        return Matrix(self.bits, group, integers, found["scales"].T, zeros.T, order)


def gptq(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED)
    version = given.choose("format", FORMATS, given.choose("checkpoint_format", FORMATS, FORMATS[0]))
    bits, group = given.choose("bits", WIDTHS), given.get("group_size", int)
    layer = GptqLayer(bits, group, version == FORMATS[0], given.get("desc_act", bool, False))
    return Scheme(given.unless("modules_to_not_convert", layer), packs=True)
