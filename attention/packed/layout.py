"""The packed layout: one matrix of integers and scales, as `products` multiplies it.

Knows: where integers, scales and minima stand.  Does not know: formats of files, products.

A packed matrix (N, K) is a row of bytes:

    head      64 bytes: N (8 bytes), nothing; then 16 for each block of 32 outputs: where it begins (8 bytes), its
              kind and to how many bytes products round states (4), nothing (4); filled up to a multiple of 64
    blocks    each begins at a multiple of 64; the last one is filled up with zeros

    block     64 bytes of a table, if integers look numbers up: 16 numbers, 128 added
              then its groups of 32 inputs; before a span of 1 to 128 of them stand 32 scales (float32), and 32 factors
              that make minima of them (float16) if there are any; where scales have factors, before 8 of them 32
              scales (float16), and 32 minima if there are any
    group     if scales are float16, 32 scales, or else 32 factors (int8), for each half of a group if halves have their
              own; then as many minima
              then the integers of the outputs 0-15, and those of 16-31

Integers of 16 outputs and 32 inputs are 8 words for each output, a byte for each of four inputs.  Their bits are cut
into planes of 8, 4, 2 and 1 (5 = 4 + 1, 6 = 4 + 2, 3 = 2 + 1); words of a plane share a line of 64 bytes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.attention.packed.formats import Quantised
from specinfer.common.memory import LargePages

BLOCK = 32  # outputs of a block
GROUP = 32  # inputs of a group
SPAN = 256  # inputs that share a scale where groups have factors
LONGEST = 128 * GROUP  # inputs that can share a float32 scale
LINE = 64  # bytes
ENTRY = 16  # bytes of a block in the head
SHIFTED = 128  # is added to the numbers of a table
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # lowest bits first
NARROW = 1 << 24  # stands in the head, by the kind: products round states to a byte
INTEGERS = "factor", "minimum_factor"  # fields that hold integers
HALF, FACTORS, SINGLE = range(3)  # scales: float16; float16 times integers; float32 for a span
BEFORE: dict[int, tuple[dict[str, torch.dtype], dict[str, torch.dtype]]] = {
    # fields of `Quantised` before a span, and before a group; the latter of two are there if there are minima
    HALF: ({}, {"scale": torch.float16, "minimum": torch.float16}),
    FACTORS: (
        {"scale": torch.float16, "minimum": torch.float16},
        {"factor": torch.int8, "minimum_factor": torch.int8},
    ),
    SINGLE: ({"scale": torch.float32, "minimum_factor": torch.float16}, {}),
}


@torch.no_grad()
def pack(parts: Iterable[Quantised], outputs: int, inputs: int, pages: LargePages | None = None) -> Tensor:
    """Return a packed matrix.

    Args:
        parts: its rows, in order, all of one kind; each but the last has a multiple of 32.
        outputs, inputs: its shape (N, K); K is a multiple of 32.
        pages: in which it lies; by default in pages of its own.

    Returns:
        uint8, one dimension.
    """
    blocks = -(-outputs // BLOCK)
    body = -(-(LINE + ENTRY * blocks) // LINE) * LINE
    packed, done, code = torch.empty(0, dtype=torch.uint8), 0, -1
    pages = pages or LargePages()
    for part in parts:
        if part.integers.shape[1] != inputs:
            raise ValueError(f"rows of {part.integers.shape[1]} inputs were given, and the matrix has {inputs}")
        if part.group < GROUP and part.factor is None:
            what = f"groups of {part.group} inputs were given"
            raise ValueError(f"{what}, and those have factors: products take no others")
        if code < 0:
            of_spans, of_groups, _ = _scales(part)
            bytes_of_block = _size(part, [*of_spans, *of_groups]) + (LINE if part.values else 0)
            code, size = code_of(part), -(-bytes_of_block // LINE) * LINE
            packed = pages.zeros(body + blocks * size)
            packed[:8].view(torch.int64)[0] = outputs
            entries = _entries(packed)
            entries[:, 0] = body + size * torch.arange(blocks)
            entries[:, 1] = code
            rows = packed[body:].view(blocks, size)
        elif code_of(part) != code:
            raise ValueError("parts of a matrix are of several kinds")
        count = -(-len(part.integers) // BLOCK)
        _fill(rows[done : done + count], part)
        done += count
    if done != blocks:
        raise ValueError(f"{done} blocks of {BLOCK} outputs were given, and {outputs} outputs are {blocks}")
    return packed


def unpack(packed: Tensor, inputs: int, part: int = 4096) -> Iterator[Quantised]:
    """Yield the parts of a packed matrix (N, K), K inputs, each of `part` rows, a multiple of 32.

    They are what it was packed from.
    """
    outputs = outputs_of(packed)
    for begin in range(0, outputs, part):
        rows = min(part, outputs - begin)
        first = begin // BLOCK
        yield blocks_of(packed, inputs, torch.arange(first, first - (-rows // BLOCK)), rows)


def blocks_of(packed: Tensor, inputs: int, chosen: Tensor, rows: int = -1) -> Quantised:
    """Return the rows of some blocks, by number, of a packed matrix with K inputs; the first ones, or all."""
    entries = _entries(packed)
    first, code = (int(number) for number in entries[0])
    blocks = packed[first:].view(len(entries), -1)[chosen]
    return _parts(blocks, code, inputs, rows if rows >= 0 else BLOCK * len(chosen))


def _entries(packed: Tensor) -> Tensor:
    """Return where each block of a packed matrix begins, and its kind: (blocks, 2), int64, a view."""
    blocks = -(-outputs_of(packed) // BLOCK)
    return packed[LINE : LINE + ENTRY * blocks].view(torch.int64).view(blocks, 2)


def outputs_of(packed: Tensor) -> int:
    """Return N of a packed matrix (N, K)."""
    return int(packed[:8].view(torch.int64))


def kind_of(packed: Tensor) -> tuple[int, int]:
    """Return the kind of a packed matrix, as `code_of` does, and the bits of its integers."""
    code = int(_entries(packed)[0, 1]) & (NARROW - 1)
    return code, code & 15


@torch.no_grad()
def narrow(packed: Tensor) -> None:
    """Let products with a packed matrix round states to integers of 8 bits, in place of 16."""
    _entries(packed)[:, 1] |= NARROW


def is_narrow(packed: Tensor) -> bool:
    """Whether products with a packed matrix round states to integers of 8 bits."""
    return bool(_entries(packed)[0, 1] & NARROW)


def code_of(part: Quantised) -> int:
    """Return a kind as the head of a matrix has it: bits, scales, table, minimum, halves, groups of a span, zero."""
    scales, span = _span(part)
    minimum = part.minimum is not None or part.minimum_factor is not None
    flags = (part.values is not None) << 6 | minimum << 7 | (part.group < GROUP) << 8
    flags |= (span // GROUP).bit_length() - 1 << 9
    return part.bits | scales << 4 | flags | (SHIFTED if part.values else part.zero) << 16


# ---- rows to blocks ----


def _fill(blocks: Tensor, part: Quantised) -> None:
    """Write rows into blocks (blocks, bytes), which are zero."""
    if part.values is not None:
        blocks[:, : len(part.values)] = torch.tensor(part.values) + SHIFTED
        blocks = blocks[:, LINE:]
    of_spans, of_groups, span = _scales(part)
    spans = part.integers.shape[1] // span
    room = blocks[:, : _size(part, [*of_spans, *of_groups])].unflatten(1, (spans, -1))
    lines = _written(room, of_spans).unflatten(2, (span // GROUP, -1))
    words = _written(lines, of_groups).view(torch.int32).unflatten(3, (2, part.bits, BLOCK // 2))
    integers = _by_blocks(part.integers).view(torch.int32).unflatten(1, (2, -1)).unflatten(3, (spans, -1, 8))
    at = 0
    for plane, first in _planes(part.bits):
        line = _line(integers, plane, first)  # (blocks, halves, 16 outputs, spans, groups, lines)
        words[..., at : at + plane, :] = line.permute(0, 3, 4, 1, 5, 2)
        at += plane


def _size(part: Quantised, scales: Sequence[Tensor]) -> int:
    """Return the bytes of a block, without those of a table, from what `_scales` returns."""
    integers = BLOCK * part.integers.shape[1] * part.bits // 8
    return integers + sum(BLOCK * values.shape[1] * values.itemsize for values in scales)


def _written(room: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Write values (N, times x n) of outputs into room (blocks, ..., bytes), by `times`; return the room after them."""
    times = room.shape[1:-1].numel()
    for each in values:
        ordered = _by_blocks(each).unflatten(2, (times, -1)).permute(0, 2, 3, 1).flatten(2).contiguous()
        size = ordered.shape[2] * each.itemsize
        words = room[..., :size].view(torch.int64)  # eight bytes at a time
        words.copy_(ordered.view(torch.int64).unflatten(1, room.shape[1:-1]))
        room = room[..., size:]
    return room


def _by_blocks(values: Tensor) -> Tensor:
    """Return values of rows, (N, n), as those of blocks, (blocks, 32, n)."""
    missing = -len(values) % BLOCK
    return (functional.pad(values, (0, 0, 0, missing)) if missing else values).unflatten(0, (-1, BLOCK))


def _scales(part: Quantised) -> tuple[list[Tensor], list[Tensor], int]:
    """Return what stands before a span and before a group, as `BEFORE` has it, and the inputs of a span."""
    kind, span = _span(part)
    of_spans, of_groups = (
        [values.to(dtype) for name, dtype in fields.items() if (values := getattr(part, name)) is not None]
        for fields in BEFORE[kind]
    )
    return of_spans, of_groups, span


def _span(part: Quantised) -> tuple[int, int]:
    """Return the kind of scales, and the inputs that share what `BEFORE` says of a span."""
    if part.factor is not None:
        return FACTORS, SPAN
    return (SINGLE, part.group) if part.scale.dtype == torch.float32 else (HALF, GROUP)


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the bits of each plane of an integer, and the first of them."""
    first = 0
    for plane in PLANES[bits]:
        yield plane, first
        first += plane


def _line(words: Tensor, bits: int, first: int) -> Tensor:
    """Return a plane of words (..., 8), int32, four integers each, as (..., lines)."""
    shared = 8 // bits  # words of a line
    mask = ((1 << bits) - 1) * 0x01010101
    plane = ((words >> first) & mask if bits < 8 else words).unflatten(-1, (bits, shared))
    line = plane[..., 0].clone()
    for index in range(1, shared):
        line |= plane[..., index] << bits * index
    return line


# ---- blocks to rows ----


def _parts(blocks: Tensor, code: int, inputs: int, outputs: int) -> Quantised:
    """Return blocks (blocks, bytes) as the rows that they were."""
    bits, scales, minimum, halves = code & 15, code >> 4 & 3, code >> 7 & 1, code >> 8 & 1
    span, groups, values, zero = 1 << (code >> 9 & 7), inputs // GROUP, None, code >> 16 & 255
    if code >> 6 & 1:
        values, zero = tuple((blocks[0, :16].int() - SHIFTED).tolist()), 0
        blocks = blocks[:, LINE:]
    of_spans, of_groups = ([*fields.items()][: 1 + minimum] for fields in BEFORE[scales])
    widths = [BLOCK * dtype.itemsize for _, dtype in of_spans]  # bytes before a span
    each = [BLOCK * dtype.itemsize * (1 + halves) for _, dtype in of_groups]  # bytes before a group
    size = sum(each) + 2 * LINE * bits
    found = blocks[:, : groups // span * sum(widths) + groups * size].reshape(len(blocks), groups // span, -1)
    *spans, found = found.split([*widths, span * size], 2)
    *before, lines = found.reshape(len(blocks), groups, size).split([*each, 2 * LINE * bits], 2)
    integers = _integers(lines, bits).view(len(blocks) * BLOCK, inputs)[:outputs]
    group = GROUP * span if scales == SINGLE else GROUP >> halves
    fields = {
        name: _to_outputs(part, dtype, outputs).to(torch.int16 if name in INTEGERS else dtype)
        for (name, dtype), part in zip([*of_spans, *of_groups], [*spans, *before], strict=True)
    }
    return Quantised(integers, bits, zero, values, group, **fields)


def _integers(lines: Tensor, bits: int) -> Tensor:
    """Return the integers of lines (blocks, groups, bytes), (blocks, 32, K)."""
    words = lines.contiguous().view(torch.int32).unflatten(2, (2, bits, BLOCK // 2))
    found, at = torch.zeros(*words.shape[:3], BLOCK // 2, 8, dtype=torch.int32), 0
    for plane, first in _planes(bits):
        shared, mask = 8 // plane, ((1 << plane) - 1) * 0x01010101
        line = words[..., at : at + plane, :].transpose(-1, -2)
        for index in range(shared):
            moved = line >> plane * index
            found[..., index::shared] |= (moved & mask if plane < 8 else moved) << first
        at += plane
    return found.permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2).view(torch.uint8)


def _to_outputs(found: Tensor, dtype: torch.dtype, outputs: int) -> Tensor:
    """Return bytes (blocks, times, n x 32 x bytes of one) as values (outputs, times x n)."""
    values = found.contiguous().view(dtype).unflatten(2, (-1, BLOCK))
    return values.permute(0, 3, 1, 2).reshape(len(found) * BLOCK, -1)[:outputs]
