"""The block formats of GGUF files: what a row's bytes say, as integers and what scales them.

Knows: where a block keeps its integers, scales and minima.  Does not know: files, the packed layout, products.

A row of K weights is K / inputs blocks, one after another.  Every format here is one formula,

    weight = scale * factor * (T[integer] - zero) + minimum * minimum_factor

with float16 scales and minima and small integer factors, so that all products are exact in float32 and only the
addition rounds.  The formats are those of ggml (ggml-quants.c); `numbers` equals gguf-py's `dequantize` bit by bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.errors import ModelError


class Quantised(NamedTuple):
    """The numbers of a matrix (N, K): scale * (T[integer] - zero) + minimum, T being the identity without values.

    A span is what shares a scale and a minimum: a group, or 256 inputs where groups have factors.  Without minima, a
    minimum's factor multiplies the scale: so numbers are those of a checkpoint with zero points.
    """

    integers: Tensor  # (N, K) uint8, from 0
    bits: int  # of an integer: 2, 3, 4, 5, 6 or 8
    zero: int  # the integer that stands for zero; 0 where there are values
    values: tuple[int, ...] | None  # what the 16 integers of 4 bits stand for, where not for themselves
    group: int  # inputs that share a factor, or else a scale: 16 or 32; with float32 scales 32 times a power of two
    scale: Tensor  # (N, K / span) float16 or float32
    factor: Tensor | None = None  # (N, K / group) int16: integers, of either sign, that multiply the scale
    minimum: Tensor | None = None  # (N, K / span) float16, with the sign it is added with
    minimum_factor: Tensor | None = None  # (N, K / group) int16


class Kind(NamedTuple):
    """How a format stores a row: its number in GGUF files, the size of a block, and what takes blocks apart."""

    id: int
    inputs: int  # weights of a block
    size: int  # bytes of a block
    read: Callable[[Tensor], Quantised] | None = None  # blocks (N, blocks, bytes) uint8; None: numbers as they are


DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
FP4 = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12  # twice the numbers of E2M1


def quantised(kind: str, rows: Tensor) -> Quantised:
    """Take rows of blocks apart.

    Args:
        kind: a name of `KINDS` that is not dense.
        rows: (N, bytes of a row) uint8, whole blocks.

    Raises:
        ModelError: no such format, or a scale or minimum that is no number.
    """
    if kind not in KINDS or (read := KINDS[kind].read) is None:
        others = ", ".join(name for name in KINDS if name not in DENSE)
        raise ModelError(f"weights of format {kind!r:.40} are not read: take a file with {others} alone")
    found = read(rows.view(len(rows), -1, KINDS[kind].size))
    if not all(part.isfinite().all() for part in (found.scale, found.minimum) if part is not None):
        raise ModelError(f"a scale of {kind} is not a number, so texts would be wrong: get the file again")
    flat = (part.reshape(len(rows), -1) if isinstance(part, Tensor) else part for part in found)
    return Quantised(*flat)  # type: ignore[arg-type]


def numbers(found: Quantised) -> Tensor:
    """Return the weights (N, K) in float32."""
    integers = found.integers
    if found.values is None:
        signed = integers.to(torch.int16) - found.zero
    else:
        signed = torch.tensor(found.values, dtype=torch.int16, device=integers.device)[integers.int()]
    groups = signed.view(len(integers), -1, found.group) * _by_group(found.scale, found.factor, found)
    if found.minimum is not None:
        groups += _by_group(found.minimum, found.minimum_factor, found)
    elif found.minimum_factor is not None:
        groups += (found.scale * found.minimum_factor)[..., None]
    return groups.view_as(integers)


def dense(kind: str, rows: Tensor) -> Tensor:
    """Return rows (N, bytes of a row) of F32, F16 or BF16 as float32 numbers (N, K), in memory that is new."""
    return rows.clone().view(DENSE[kind]).float()  # a file's rows may begin at any byte


def half_powers(octets: Tensor) -> Tensor:
    """Return half of the powers of two that bytes stand for (E8M0), as float32: `FP4` is doubled; 255 is no number."""
    exponent = octets.int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.view(torch.float32).masked_fill(exponent == 255, torch.nan)


def _by_group(scale: Tensor, factor: Tensor | None, found: Quantised) -> Tensor:
    """Return scale times factor as float32 (N, K / group, 1)."""
    if factor is None:
        return scale.float()[..., None]
    count = 256 // found.group
    return (scale.float()[..., None] * factor.view(*scale.shape, count)).flatten(1)[..., None]


# ---- blocks (N, blocks, bytes) uint8 -> Quantised, whose tensors are (N, blocks, ...) ----


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _split(part: Tensor, width: int) -> Tensor:
    """Split bytes (..., n) into their fields of 1, 2 or 4 bits (..., 8 / width, n), the lowest first."""
    mask = (1 << width) - 1
    return torch.stack([(part >> shift) & mask for shift in range(0, 8, width)], -2)


def _single(blocks: Tensor, bits: int, zero: int, minimum: bool, values: tuple[int, ...] | None = None) -> Quantised:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: a scale, maybe a minimum, fifth bits, then nibbles; the low ones come first."""
    at = 4 if minimum else 2
    integers = _split(blocks[..., -16:], 4).flatten(-2)
    if bits == 5:  # bit i of 32 is the input's
        integers |= _split(blocks[..., at : at + 4], 1).transpose(-1, -2).flatten(-2) << 4
    least = _half(blocks, 2) if minimum else None
    return Quantised(integers, bits, zero, values, 32, _half(blocks, 0), None, least)


def _q8_0(blocks: Tensor) -> Quantised:
    return Quantised(blocks[..., 2:] ^ 128, 8, 128, None, 32, _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Quantised:
    integers = _split(blocks[..., 1:], 4).flatten(-2)
    return Quantised(integers, 4, 0, FP4, 32, half_powers(blocks[..., :1]))


def _q2_k(blocks: Tensor) -> Quantised:
    factors = blocks[..., :16].short()
    integers = _split(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3)
    minimum = -_half(blocks, 82)
    return Quantised(integers, 2, 0, None, 16, _half(blocks, 80), factors & 15, minimum, factors >> 4)


def _q3_k(blocks: Tensor) -> Quantised:
    """Third bits that are clear mean -4; factors have 4 low bits and 2 high ones, and stand 32 too high."""
    integers = _split(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    integers |= _split(blocks[..., :32], 1).flatten(-2) << 2
    factors = _split(blocks[..., 96:104], 4).flatten(-2) | _split(blocks[..., 104:108], 2).flatten(-2) << 4
    return Quantised(integers, 3, 4, None, 16, _half(blocks, 108), factors.short() - 32)


def _q45_k(blocks: Tensor, bits: int) -> Quantised:
    """Q4_K, Q5_K: of 8 factors, 4 have all 6 bits together; the high bits of the others are in spare bits of those."""
    scales, minima, mixed = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    factor = torch.cat([scales & 63, (mixed & 15) | scales >> 6 << 4], -1)
    minimum_factor = torch.cat([minima & 63, mixed >> 4 | minima >> 6 << 4], -1)
    integers = _split(blocks[..., -128:].unflatten(-1, (4, 32)), 4).flatten(-3)
    if bits == 5:
        integers |= _split(blocks[..., 16:48], 1).flatten(-2) << 4
    scale, minimum = _half(blocks, 0), -_half(blocks, 2)
    return Quantised(integers, bits, 0, None, 32, scale, factor.short(), minimum, minimum_factor.short())


def _q6_k(blocks: Tensor) -> Quantised:
    integers = _split(blocks[..., :128].unflatten(-1, (2, 64)), 4).flatten(-3)
    integers |= _split(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3) << 4
    factor = blocks[..., 192:208].view(torch.int8).short()
    return Quantised(integers, 6, 32, None, 16, _half(blocks, 208), factor)


def _iq4_xs(blocks: Tensor) -> Quantised:
    """Factors have 4 low bits and 2 high ones, and stand 32 too high."""
    low = _split(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _split(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    integers = _split(blocks[..., 8:].unflatten(-1, (8, 16)), 4).flatten(-3)
    factor = (low | high << 4).short() - 32
    return Quantised(integers, 4, 0, _IQ4, 32, _half(blocks, 0), factor)


def _tq1_0(blocks: Tensor) -> Quantised:
    """A byte is a fraction of 256 with five digits to base 3, or four: multiples of it bring each to the front."""
    powers = 3 ** torch.arange(5, dtype=torch.uint8)[:, None]
    parts = (blocks[..., None, :32], powers), (blocks[..., None, 32:48], powers), (blocks[..., None, 48:52], powers[:4])
    moved = torch.cat([(octets * each).flatten(-2) for octets, each in parts], -1)
    integers = (moved.short() * 3 >> 8).byte()
    return Quantised(integers, 2, 1, None, 256, _half(blocks, 52).float())


def _tq2_0(blocks: Tensor) -> Quantised:
    integers = _split(blocks[..., :64].unflatten(-1, (2, 32)), 2).flatten(-3)
    return Quantised(integers, 2, 1, None, 256, _half(blocks, 64).float())


KINDS = {
    "F32": Kind(0, 1, 4),
    "F16": Kind(1, 1, 2),
    "Q4_0": Kind(2, 32, 18, lambda blocks: _single(blocks, 4, 8, minimum=False)),
    "Q4_1": Kind(3, 32, 20, lambda blocks: _single(blocks, 4, 0, minimum=True)),
    "Q5_0": Kind(6, 32, 22, lambda blocks: _single(blocks, 5, 16, minimum=False)),
    "Q5_1": Kind(7, 32, 24, lambda blocks: _single(blocks, 5, 0, minimum=True)),
    "Q8_0": Kind(8, 32, 34, _q8_0),
    "Q2_K": Kind(10, 256, 84, _q2_k),
    "Q3_K": Kind(11, 256, 110, _q3_k),
    "Q4_K": Kind(12, 256, 144, lambda blocks: _q45_k(blocks, 4)),
    "Q5_K": Kind(13, 256, 176, lambda blocks: _q45_k(blocks, 5)),
    "Q6_K": Kind(14, 256, 210, _q6_k),
    "IQ4_NL": Kind(20, 32, 18, lambda blocks: _single(blocks, 4, 0, minimum=False, values=_IQ4)),
    "IQ4_XS": Kind(23, 256, 136, _iq4_xs),
    "BF16": Kind(30, 1, 2),
    "TQ1_0": Kind(34, 256, 54, _tq1_0),
    "TQ2_0": Kind(35, 256, 66, _tq2_0),
    "MXFP4": Kind(39, 32, 17, _mxfp4),
}
