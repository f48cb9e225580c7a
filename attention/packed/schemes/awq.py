"""AWQ: 4 bits, eight outputs in a word, as AutoAWQ's "gemm" version stores them.

Knows: the order of a word's integers.  Does not know: files, models, the packed layout.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from specinfer.attention.packed.schemes.base import (
    FLOATS,
    WORD,
    Expected,
    Layer,
    Matrix,
    Scheme,
    Settings,
    fields,
    group_of,
)
from specinfer.errors import ModelError

BITS = 4
SHARED = WORD // BITS  # outputs of a word
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")  # which integer of a word is an output's
# how matrices were found, and which kernels their program took
UNUSED = (
    *("quant_method", "method", "backend", "meta", "sym", "lm_head", "pack_dtype"),
    *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config"),
)


class AwqLayer(Layer):
    """A matrix (N, K): words (K, N / 8), zero points in words (K / group, N / 8)."""

    def __init__(self, group: int) -> None:
        self.group = group

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        groups = inputs // group_of(self.group, inputs)
        if outputs % SHARED:
            raise ModelError(f"words of {SHARED} outputs cannot hold {outputs}: the file was made by another program")
        return {
            "qweight": Expected(("I32",), (inputs, outputs // SHARED)),
            "qzeros": Expected(("I32",), (groups, outputs // SHARED)),
            "scales": Expected(FLOATS, (groups, outputs)),
        }

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix:
        """See `Layer`."""
        words = found["qweight"]

        def integers(rows: slice) -> Tensor:
            return _of_outputs(words[:, rows.start // SHARED : rows.stop // SHARED])

        zeros = _of_outputs(found["qzeros"]).short()
        return Matrix(BITS, group_of(self.group, inputs), integers, found["scales"].T, zeros, None)


def _of_outputs(words: Tensor) -> Tensor:
    """Return the integers of words (n, N / 8) as (N, n)."""
    return fields(words, BITS).unflatten(1, (-1, SHARED))[..., ORDER].flatten(1).T.contiguous()


def awq(given: Settings) -> Scheme:
    """Return what a configuration says."""
    given.forget(UNUSED)
    given.choose("bits", [BITS])
    for name in ("version", "format", "checkpoint_format"):  # older files and newer ones
        given.choose(name, ["gemm"], "gemm")
    given.choose("desc_act", [False], False)
    given.get("zero_point", bool, True)  # there are zero points in either case
    return Scheme(given.unless("modules_to_not_convert", AwqLayer(given.get("group_size", int))), packs=True)
