"""AWQ and GPTQ: matrices of integers in words of 32 bits, with zero points in words beside them.

Knows: the order of a word's integers, as AutoAWQ's "gemm" version and both versions of GPTQ have it.
Does not know: files, models, the packed layout.

    AWQ       4 bits, a word for eight outputs
    GPTQ      4 or 8 bits, a word for neighbouring inputs, in groups that may be scattered ("act-order")
"""

from collections.abc import Mapping

import torch
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

AWQ_BITS = 4
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")  # which integer of AWQ's words is an output's
GPTQ_VERSIONS = "gptq", "gptq_v2"  # zero points are stored less one, or as they are
# how matrices were found, and which kernels their program took
UNUSED_OF_AWQ = (
    *("quant_method", "method", "backend", "meta", "sym", "lm_head", "pack_dtype"),
    *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config"),
)
# how matrices were found, and by which program; tensors say which layers are quantised, and in which order
UNUSED_OF_GPTQ = (
    *("quant_method", "quantizer", "quant_algo", "method", "meta", "sym", "static_groups", "true_sequential"),
    *("damp_percent", "damp_auto_increment", "act_group_aware", "mse", "dataset", "tokenizer", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "batch_size", "pad_token_id", "max_input_length", "lm_head"),
    *("cache_block_outputs", "modules_in_block_to_quantize", "block_name_to_quantize", "pack_dtype", "dynamic"),
    *("module_name_preceding_first_block", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
    *("max_exllama_size", "backend", "is_marlin_format", "uses_exllama"),
)


class AwqLayer(Layer):
    """A matrix (N, K): words (K, N / 8), zero points in words (K / group, N / 8)."""

    def __init__(self, group: int) -> None:
        self.group = group

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        shared = WORD // AWQ_BITS
        words = Expected(("I32",), (inputs, outputs // shared))
        return {"qweight": words, **_beside(inputs // group_of(self.group, inputs), outputs, shared)}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix:
        """See `Layer`."""
        shared = WORD // AWQ_BITS

        def integers(rows: slice) -> Tensor:
            return _of_outputs(found["qweight"][:, rows.start // shared : rows.stop // shared])

        zeros = _of_outputs(found["qzeros"]).short()
        return Matrix(AWQ_BITS, group_of(self.group, inputs), integers, found["scales"].T, zeros, None)


class GptqLayer(Layer):
    """A matrix (N, K): words (K x bits / 32, N), zero points in words (K / group, N x bits / 32)."""

    def __init__(self, bits: int, group: int, less: int, ordered: bool) -> None:
        self.bits, self.group, self.less, self.ordered = bits, group, less, ordered

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        groups, shared = inputs // group_of(self.group, inputs), WORD // self.bits
        words = Expected(("I32",), (inputs // shared, outputs))
        index = Expected(("I32",), (inputs,), optional=not self.ordered)
        return {"qweight": words, **_beside(groups, outputs, shared), "g_idx": index}

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


def _beside(groups: int, outputs: int, shared: int) -> dict[str, Expected]:
    """Return zero points and scales of groups of inputs, given how many zero points share a word.

    Raises:
        ModelError: words of zero points cannot hold the outputs.
    """
    if outputs % shared:
        raise ModelError(f"words of {shared} zero points cannot hold {outputs}: another program made the file")
    zeros = Expected(("I32",), (groups, outputs // shared))
    return {"qzeros": zeros, "scales": Expected(FLOATS, (groups, outputs))}


def _of_outputs(words: Tensor) -> Tensor:
    """Return the integers of words (n, N / 8) as (N, n)."""
    return fields(words, AWQ_BITS).unflatten(1, (-1, len(ORDER)))[..., ORDER].flatten(1).T.contiguous()


def awq(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED_OF_AWQ)
    given.choose("bits", [AWQ_BITS])
    for name in ("version", "format", "checkpoint_format"):  # older files and newer ones
        given.choose(name, ["gemm"], "gemm")
    given.choose("desc_act", [False], False)
    given.get("zero_point", bool, True)  # there are zero points in either case
    return Scheme(given.unless("modules_to_not_convert", AwqLayer(given.get("group_size", int))), packs=True)


def gptq(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED_OF_GPTQ)
    older = given.choose("checkpoint_format", GPTQ_VERSIONS, GPTQ_VERSIONS[0])
    version = given.choose("format", GPTQ_VERSIONS, older)
    bits, group = given.choose("bits", WIDTHS), given.get("group_size", int)
    layer = GptqLayer(bits, group, version == GPTQ_VERSIONS[0], given.get("desc_act", bool, False))
    return Scheme(given.unless("modules_to_not_convert", layer), packs=True)
