"""The packed layout: one matrix of integers and scales, as `products` multiplies it.

Knows: where integers, scales and minima stand.  Does not know: formats of files, products.

A packed matrix (N, K) is a row of bytes:

    head      64 bytes: N (8 bytes), nothing; then 16 for each block of 32 outputs: where it begins (8 bytes), its
              kind (4), nothing (4); filled up to a multiple of 64
    blocks    each begins at a multiple of 64; the last one is filled up with zeros

    block     64 bytes of a table, if integers look numbers up: 16 numbers, 128 added
              then its groups of 32 inputs; where scales have factors, 32 scales (float16) stand before 8 of them,
              and 32 minima if there are any
    group     32 scales (float16 or float32), or else 32 factors (int8), for each half of a group if halves have their
              own; then as many minima
              then the integers of the outputs 0-15, and those of 16-31

Integers of 16 outputs and 32 inputs are 8 words for each output, a byte for each of four inputs.  Their bits are cut
into planes of 8, 4, 2 and 1 (5 = 4 + 1, 6 = 4 + 2, 3 = 2 + 1); words of a plane share a line of 64 bytes.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from specinfer.attention.packed.formats import Quantised
from specinfer.common.memory import LargePages

BLOCK = 32  # outputs of a block
GROUP = 32  # inputs of a group
SPAN = 256  # inputs that share a scale where groups have factors
LINE = 64  # bytes
ENTRY = 16  # bytes of a block in the head
SHIFTED = 128  # is added to the numbers of a table
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # lowest bits first
HALF, FACTORS, SINGLE = range(3)  # scales: float16; float16 times integers; float32


@torch.no_grad()
def pack(
    parts: Iterable[Quantised], outputs: int, inputs: int, pages: LargePages
) -> Tensor:
    """Return a packed matrix.

    Args:
        parts: its rows, in order, all of one kind; each but the last has a multiple of 32.
        outputs, inputs: its shape (N, K); K is a multiple of 32.
        pages: where it lies.

    Returns:
        uint8, one dimension.
    """
    blocks = -(-outputs // BLOCK)
    body = -(-(LINE + ENTRY * blocks) // LINE) * LINE
    packed, done, code = torch.empty(0, dtype=torch.uint8), 0, -1
    for part in parts:
        if part.integers.shape[1] != inputs:
            raise ValueError(f"rows of {part.integers.shape[1]} inputs were given, and the matrix has {inputs}")
        found = _blocks(part)
        if code < 0:
            code, size = code_of(part), -(-found.shape[1] // LINE) * LINE
            packed = pages.zeros(body + blocks * size)
            packed[:8].view(torch.int64)[0] = outputs
            entries = packed[LINE : LINE + ENTRY * blocks].view(torch.int64).view(blocks, 2)
            entries[:, 0] = body + size * torch.arange(blocks)
            entries[:, 1] = code
            rows = packed[body:].view(blocks, size)
        elif code_of(part) != code:
            raise ValueError("parts of a matrix are of several kinds")
        rows[done : done + len(found), : found.shape[1]] = found
        done += len(found)
    if done != blocks:
        raise ValueError(f"{done} blocks of {BLOCK} outputs were given, and {outputs} outputs are {blocks}")
    return packed


def unpack(packed: Tensor, inputs: int, part: int = 4096) -> Iterator[Quantised]:
    """Yield the parts of a packed matrix (N, K), K inputs, each of so many rows: a multiple of 32.

    They are what it was packed from.
    """
    outputs = outputs_of(packed)
    for begin in range(0, outputs, part):
        rows = min(part, outputs - begin)
        first = begin // BLOCK
        yield blocks_of(packed, inputs, torch.arange(first, first - (-rows // BLOCK)), rows)


def blocks_of(packed: Tensor, inputs: int, chosen: Tensor, rows: int = -1) -> Quantised:
    """Return the rows of some blocks, by number, of a packed matrix with so many inputs; the first ones, or all."""
    blocks = -(-outputs_of(packed) // BLOCK)
    entries = packed[LINE : LINE + ENTRY * blocks].view(torch.int64).view(blocks, 2)
    first, code = (int(number) for number in entries[0])
    return _parts(packed[first:].view(blocks, -1)[chosen], code, inputs, rows if rows >= 0 else BLOCK * len(chosen))


def outputs_of(packed: Tensor) -> int:
    """Return N of a packed matrix (N, K)."""
    return int(packed[:8].view(torch.int64))


def code_of(part: Quantised) -> int:
    """Return a kind as the head of a matrix has it: bits, scales, table, minimum, halves, zero."""
    scales = FACTORS if part.factor is not None else SINGLE if part.scale.dtype == torch.float32 else HALF
    flags = (part.values is not None) << 6 | (part.minimum is not None) << 7 | (part.group < GROUP) << 8
    return part.bits | scales << 4 | flags | (SHIFTED if part.values else part.zero) << 16


# ---- rows to blocks ----


def _blocks(part: Quantised) -> Tensor:
    """Return rows as blocks, (blocks, bytes)."""
    missing = -len(part.integers) % BLOCK

    def filled(values: Tensor) -> Tensor:  # (blocks, 32, ...)
        return torch.nn.functional.pad(values, (0, 0, 0, missing)).unflatten(0, (-1, BLOCK))

    integers = filled(part.integers)
    blocks, _, inputs = integers.shape
    groups = inputs // GROUP
    lines = [_lines(integers, bits, first) for bits, first in _planes(part.bits)]
    scales = part.scale if part.factor is None else part.factor.to(torch.int8)
    minima = part.minimum if part.minimum_factor is None else part.minimum_factor.to(torch.int8)
    before = [_of_outputs(filled(values), groups) for values in (scales, minima) if values is not None]
    found = torch.cat([*before, torch.cat(lines, 3).flatten(2)], 2)  # (blocks, groups, bytes)
    if part.factor is not None:
        spans = inputs // SPAN
        supers = [_of_outputs(filled(values), spans) for values in (part.scale, part.minimum) if values is not None]
        found = torch.cat([*supers, found.view(blocks, spans, -1)], 2)
    found = found.view(blocks, -1)
    return found if part.values is None else torch.cat([_table(part.values).expand(blocks, LINE), found], 1)


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the bits of each plane of an integer, and the first of them."""
    first = 0
    for plane in PLANES[bits]:
        yield plane, first
        first += plane


def _lines(integers: Tensor, bits: int, first: int) -> Tensor:
    """Return a plane of integers (blocks, 32, K) as lines, (blocks, groups, halves, lines, 64)."""
    shared = 8 // bits  # words of a line
    plane = (integers >> first) & ((1 << bits) - 1) if bits < 8 else integers
    words = plane.view(len(integers), 2, BLOCK // 2, -1, bits, shared, 4)
    line = words[..., 0, :].clone()
    for index in range(1, shared):
        line |= words[..., index, :] << (bits * index)
    return line.permute(0, 3, 1, 4, 2, 5).flatten(4)


def _of_outputs(values: Tensor, times: int) -> Tensor:
    """Return values (blocks, 32, times x n) as bytes, (blocks, times, n x 32 x bytes of one)."""
    ordered = values.unflatten(2, (times, -1)).permute(0, 2, 3, 1).contiguous()
    return ordered.view(torch.uint8).flatten(2)


def _table(values: tuple[int, ...]) -> Tensor:
    found = torch.zeros(LINE, dtype=torch.uint8)
    found[: len(values)] = torch.tensor(values) + SHIFTED
    return found


# ---- blocks to rows ----


def _parts(blocks: Tensor, code: int, inputs: int, outputs: int) -> Quantised:
    """Return blocks (blocks, bytes) as the rows that they were."""
    bits, scales, minimum, halves = code & 15, code >> 4 & 3, code >> 7 & 1, code >> 8 & 1
    group, values, zero = GROUP >> halves, None, code >> 16 & 255
    if code >> 6 & 1:
        values, zero = tuple((blocks[0, :16].int() - SHIFTED).tolist()), 0
        blocks = blocks[:, LINE:]
    dtype = {HALF: torch.float16, FACTORS: torch.int8, SINGLE: torch.float32}[scales]
    spans, groups, count = inputs // SPAN, inputs // GROUP, 1 + minimum
    width = BLOCK * dtype.itemsize * (1 + halves)  # bytes of scales before a group, and of minima
    body = count * width + 2 * LINE * bits
    supers = count * 2 * BLOCK if scales == FACTORS else 0
    found = blocks[:, : spans * supers + groups * body]
    super_scales: list[Tensor] = []
    if supers:
        found = found.view(len(blocks), spans, -1)
        super_scales = [_to_outputs(each, torch.float16, outputs) for each in found[..., :supers].chunk(count, -1)]
        found = found[..., supers:]
    found = found.reshape(len(blocks), groups, body)
    scaled = [_to_outputs(each, dtype, outputs) for each in found[..., : count * width].chunk(count, -1)]
    integers = _integers(found[..., count * width :], bits).reshape(len(blocks) * BLOCK, inputs)[:outputs]
    if not supers:
        return Quantised(integers, bits, zero, values, group, scaled[0], None, scaled[1] if minimum else None, None)
    factors = [each.to(torch.int16) for each in scaled]
    least, least_factors = (super_scales[1], factors[1]) if minimum else (None, None)
    return Quantised(integers, bits, zero, values, group, super_scales[0], factors[0], least, least_factors)


def _integers(lines: Tensor, bits: int) -> Tensor:
    """Return the integers of lines (blocks, groups, bytes), (blocks, 32, groups, 8, 4)."""
    lines = lines.reshape(*lines.shape[:2], 2, -1, LINE)
    found = torch.zeros(*lines.shape[:3], 8, BLOCK // 2, 4, dtype=torch.uint8)
    for plane, first in _planes(bits):
        line, lines = lines[..., :plane, :], lines[..., plane:, :]
        shifts = plane * torch.arange(8 // plane, dtype=torch.uint8)
        words = (line.unsqueeze(4) >> shifts[:, None]) & ((1 << plane) - 1)
        found |= words.reshape(found.shape) << first
    return found.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def _to_outputs(found: Tensor, dtype: torch.dtype, outputs: int) -> Tensor:
    """Return bytes (blocks, times, n x 32 x bytes of one) as values (outputs, times x n)."""
    values = found.contiguous().view(dtype).unflatten(2, (-1, BLOCK))
    return values.permute(0, 3, 1, 2).reshape(len(found) * BLOCK, -1)[:outputs]
