"""GGUF files: what their headers say, and where their tensors are.

Knows: the container of versions 2 and 3, little endian, in one file or in parts.  Does not know: what keys and tensors
mean, models, tokenizers.

A file is mapped into memory, and its tensors are views of the map: their bytes are read when somebody reads them.  A
header is not trusted: every count and offset is compared with the size of the file before anything is made of it.
The container is described in ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from pathlib import Path
from struct import Struct
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from specinfer.attention.packed.formats import KINDS
from specinfer.errors import ModelError

Value = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

VERSIONS = 2, 3
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of tensors, where a file does not say
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # the end of the name of a part, from 1
# Formats that exist and are not read, and others that tensors may not have.
_OTHERS = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
_OTHERS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 40: "NVFP4"}
_NAMES = {kind.id: name for name, kind in KINDS.items()}
_NUMBERS = {number: Struct(f"<{form}") for number, form in enumerate("BbHhIif?")}
_NUMBERS |= {10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d")}
_COUNT, _LENGTH = _NUMBERS[4], _NUMBERS[10]
_TEXT, _ARRAY = 8, 9
_LEAST_KEY = 8 + 4 + 1  # bytes: the length of a key, a type, a value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes: the length of a name, dimensions, one of them, a format, an offset


class Stored(NamedTuple):
    """A tensor of a file."""

    kind: str  # its format, of `formats.KINDS`
    shape: tuple[int, ...]  # as torch has it: the last dimension is that of neighbours in memory
    rows: Tensor  # (N, bytes of a row) uint8, a view of the file; N = all dimensions but the last


class Gguf(NamedTuple):
    """What a file, or all parts of one, hold: metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Stored]
    maps: list[mmap.mmap]

    def release(self) -> None:
        """Let the system take back the memory of pages that were read; they are read again if need be."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for pages in self.maps:
                pages.madvise(mmap.MADV_DONTNEED)


def open_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Map a file, or all parts of a split one by its first, and read the header.

    Raises:
        ModelError: it cannot be read, is no such file, is damaged, or has tensors of formats that are not read.
    """
    path = Path(path)
    header = _Header(path)
    parts = _number(header, "split.count", 1)
    if parts == 1:
        return Gguf(path, header.metadata, header.tensors(), [header.data])
    name = PART.search(path.name)
    if name is None or name[1] != "00001" or int(name[2]) != parts:
        header.refuse(f"it is one of {parts} parts", f"give the first, whose name ends in -00001-of-{parts:05}.gguf")
    stem, headers = path.name[: name.start()], [header]
    headers += [_Header(path.with_name(f"{stem}-{part:05}-of-{name[2]}.gguf")) for part in range(2, parts + 1)]
    tensors: dict[str, Stored] = {}
    for number, part in enumerate(headers):
        if (_number(part, "split.no", -1), _number(part, "split.count", 1)) != (number, parts):
            part.refuse(f"it is not part {number + 1} of {parts}", "the parts do not belong together, get them again")
        found = part.tensors()
        if both := tensors.keys() & found:
            part.refuse(f"tensor {min(both)!r:.80} is in an earlier part as well")
        tensors |= found
    if len(tensors) != (wanted := _number(header, "split.tensors.count", len(tensors))):
        header.refuse(f"its parts hold {len(tensors)} tensors, and should hold {wanted}")
    return Gguf(path, header.metadata, tensors, [part.data for part in headers])


def _number(header: _Header, key: str, default: int) -> int:
    """Return a number of the metadata, at least 0, or the default where there is none."""
    value = header.metadata.get(key, default)
    if type(value) is not int or (key in header.metadata and value < 0):
        header.refuse(f"{key} is {value!r:.40}, and should be a number")
    return value


class _Header:
    """The header of one file, read from the front; `metadata` is read at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                # as a copy of changes, of which there are none: torch wants memory that may be written
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else self.refuse("empty")
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        if self.take(4) != b"GGUF":
            self.refuse("it does not begin with GGUF", "it is another kind of file, or one that was not downloaded")
        version = self.number(_COUNT)
        if version not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "its numbers are big endian" if big else f"its version is {version}"
            self.refuse(what, "versions 2 and 3, little endian, are read: convert the model again")
        self.count = self.counted(_LEAST_TENSOR, "tensors")
        self.metadata: dict[str, Value] = {}
        for _ in range(self.counted(_LEAST_KEY, "keys")):
            (key,) = self.texts(1)
            if key in self.metadata:
                self.refuse(f"key {key!r:.80} is there twice")
            self.metadata[key] = self.value(self.number(_COUNT), key)

    def refuse(self, what: str, advice: str = "the file is damaged, get it again") -> NoReturn:
        """Raise `ModelError`."""
        raise ModelError(f"cannot read {self.path}: {what}; {advice}")

    def take(self, count: int) -> bytes:
        """Read bytes."""
        begin, self.at = self.at, self.at + count
        if self.at > self.size:
            self.refuse(f"it ends after {self.size} bytes, within its header")
        return self.data[begin : self.at]

    def number(self, form: Struct) -> int:
        """Read a number."""
        return form.unpack(self.take(form.size))[0]

    def counted(self, least: int, what: str) -> int:
        """Read how many of something follow, each of at least `least` bytes."""
        count = self.number(_LENGTH)
        if count * least > self.size - self.at:
            self.refuse(f"it should hold {count} {what}, and has no room for them")
        return count

    def texts(self, count: int) -> list[str]:
        """Read `count` texts; there may be 300,000, so each is read in a few operations."""
        found, data, at, size = [], self.data, self.at, self.size
        try:
            for _ in range(count):
                begin = at + _LENGTH.size
                at = begin + int.from_bytes(data[at:begin], "little")
                if at > size:
                    self.refuse(f"it ends after {size} bytes, within its header")
                found.append(data[begin:at].decode())
        except UnicodeDecodeError:
            self.refuse("a text of its header is not UTF-8")
        self.at = at
        return found

    def value(self, kind: int, key: str) -> Value:
        """Read a value of the metadata."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.texts(1)[0]
        kind, array = (self.number(_COUNT) if kind == _ARRAY else kind), kind == _ARRAY
        if array and kind == _TEXT:
            return self.texts(self.counted(_LENGTH.size, f"texts in {key!r:.80}"))
        if not array or kind not in _NUMBERS:
            self.refuse(f"key {key!r:.80} has values of unknown type {kind}")
        form = _NUMBERS[kind]
        count = self.counted(form.size, f"numbers in {key!r:.80}")
        return [number for (number,) in form.iter_unpack(self.take(count * form.size))]

    def tensors(self) -> dict[str, Stored]:
        """Read the table of tensors, after the metadata, and find each in the file."""
        table = {}
        for _ in range(self.count):
            (name,) = self.texts(1)
            if name in table:
                self.refuse(f"tensor {name!r:.80} is there twice")
            dimensions = self.number(_COUNT)
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                self.refuse(f"tensor {name!r:.80} has {dimensions} dimensions, and 1 to {MAX_DIMENSIONS} are possible")
            shape = tuple(self.number(_LENGTH) for _ in range(dimensions))[::-1]
            table[name] = shape, self.number(_COUNT), self.number(_LENGTH)
        alignment = _number(self, "general.alignment", ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            self.refuse(f"general.alignment is {alignment}, and should be a power of two")
        start = -(-self.at // alignment) * alignment
        for name, (_, _, offset) in table.items():
            if offset % alignment:
                self.refuse(f"tensor {name!r:.80} begins at {offset}, which is not a multiple of {alignment}")
        return {name: self.stored(name, shape, kind, start + at) for name, (shape, kind, at) in table.items()}

    def stored(self, name: str, shape: tuple[int, ...], number: int, start: int) -> Stored:
        """Return a tensor that begins at a byte of the file."""
        if number not in _NAMES:
            kind = _OTHERS.get(number, f"number {number}")
            advice = f"take a file with {', '.join(KINDS)} alone, such as Q4_K_M"
            self.refuse(f"tensor {name!r:.80} has format {kind}, which is not read", advice)
        form = KINDS[_NAMES[number]]
        if 0 in shape or shape[-1] % form.inputs:
            self.refuse(f"tensor {name!r:.80} of {_NAMES[number]} has shape {shape}, which cuts a block")
        row = shape[-1] // form.inputs * form.size
        count = math.prod(shape[:-1]) * row
        if start + count > self.size:
            self.refuse(f"tensor {name!r:.80} ends at byte {start + count}, and the file at {self.size}")
        view = torch.frombuffer(self.data, dtype=torch.uint8, count=count, offset=start)
        return Stored(_NAMES[number], shape, view.view(-1, row))
