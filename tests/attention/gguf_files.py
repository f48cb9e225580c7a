"""GGUF files made byte by byte, for tests of what reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}  # types of values, and how they are packed


class Made(NamedTuple):
    """A tensor to write: the number of its format, its shape as torch has it, its bytes, and its offset if it lies."""

    kind: int
    shape: Sequence[int]
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def value(given: object) -> bytes:
    """The type of a value and the value; bytes are taken as they are."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, list):
        kind, form = (8, "") if isinstance(given[0], str) else NUMBERS[type(given[0])]
        packed = b"".join(map(text, given)) if kind == 8 else struct.pack(f"<{len(given)}{form}", *given)
        return struct.pack("<IIQ", 9, kind, len(given)) + packed
    kind, form = NUMBERS[type(given)]
    return struct.pack(f"<I{form}", kind, given)


def gguf(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    tensors: Mapping[str, Made] | Sequence[tuple[str, Made]] = (),
    version: int = 3,
    keys: int | None = None,
    count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; `keys` and `count` are what its header says of its keys and tensors, if it lies."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    made = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    table, data = b"", b""
    for name, tensor in made:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        table += text(name) + dimensions + struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data
    counts = (len(made) if count is None else count), (len(pairs) if keys is None else keys)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts)
    header += b"".join(text(key) + value(given) for key, given in pairs) + table
    return header + bytes(-len(header) % alignment) + data


def stored(weight: Tensor, form: str) -> tuple[Made, Tensor]:
    """A matrix or a vector as a file has it, and its numbers there: F32, F16, BF16 or Q8_0."""
    dense = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}
    if form in dense:
        kind, dtype = dense[form]
        rounded = weight.to(dtype).contiguous()
        return Made(kind, tuple(weight.shape), raw(rounded)), rounded.float()
    blocks = weight.unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    integers = (blocks / scale.float()).round().clamp(-127, 127)
    data = torch.cat([scale.view(torch.uint8), integers.to(torch.int8).view(torch.uint8)], -1)
    return Made(8, tuple(weight.shape), raw(data)), (integers * scale.float()).flatten(-2)


def raw(values: Tensor) -> bytes:
    return bytes(values.flatten().view(torch.uint8).tolist())
