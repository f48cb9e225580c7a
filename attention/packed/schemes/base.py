"""What the methods have in common: words of integers, groups, zero points, orders of inputs, settings.

Knows: what a method says of a layer, and how its numbers become rows of the packed layout.
Does not know: files, models, the methods themselves.

Every method of integers is one formula, weight = scale * (integer - zero point), for a group of inputs.  Zero points
have 8 bits at most, and scales 16 if there are any, so that products and differences are exact in float32.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specinfer.attention.packed.formats import Quantised
from specinfer.attention.packed.layout import GROUP, LONGEST
from specinfer.errors import ModelError

T = TypeVar("T")

PART = 512  # rows that are taken apart at once: a multiple of 32
WORD = 32  # bits
FLOATS = "F16", "BF16", "F32"  # dtypes, as safetensors name them
WIDTHS = 4, 8  # bits of integers that are read


class Expected(NamedTuple):
    """What a tensor of a layer must be."""

    dtypes: tuple[str, ...]  # any of these, as safetensors name them
    shape: tuple[int, ...]
    optional: bool = False


class Matrix(NamedTuple):
    """A matrix (N, K) of integers; its inputs stand in an order of their own, in which groups are whole."""

    bits: int
    group: int  # inputs that share a scale: a multiple of 32
    integers: Callable[[slice], Tensor]  # (n, K) uint8 of some outputs, from 0, each input at its own place
    scales: Tensor  # (N, K / group)
    zeros: Tensor | None  # (N, K / group) int16: the integers that stand for zero, where it is not the middle one
    order: Tensor | None  # (K) int64: the input that stands at each place, where not itself
    values: tuple[int, ...] | None = None  # what integers of 4 bits stand for, where not for themselves


class Layer(ABC):
    """How a method stores a linear layer."""

    @abstractmethod
    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """Return the tensors of a layer's matrix (N, K), by the last part of their names.

        Raises:
            ModelError: no matrix of this shape can be stored so.
        """

    @abstractmethod
    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix | Tensor:
        """Return a matrix of integers, or numbers (N, K) in float32 where they are none.

        Args:
            found: what `tensors` names; optional ones may be missing.

        Raises:
            ModelError: values that a matrix cannot have.
        """


class Scheme(NamedTuple):
    """What a checkpoint says of its layers."""

    layer: Callable[[str], Layer | None]  # of a module, by its name; None if the module is not quantised
    packs: bool  # whether matrices are integers, which are packed
    unused: frozenset[str] = frozenset()  # last parts of names of tensors that change nothing here


def parts(matrix: Matrix, outputs: int) -> Iterator[Quantised]:
    """Yield a matrix's rows, a few hundred at a time, which takes little memory.

    Raises:
        ModelError: a scale is no number.
    """
    scales, middle = matrix.scales.float(), 0 if matrix.values else 1 << (matrix.bits - 1)
    if not scales.isfinite().all():
        raise ModelError("a scale is not a number, so texts would be wrong: get the file again")
    offsets, span = None, min(matrix.group & -matrix.group, LONGEST)  # a power of two
    times = matrix.group // span
    if matrix.zeros is not None and (matrix.zeros != middle).any():
        if matrix.scales.dtype == torch.float32:
            raise ModelError("its scales have 32 bits, and 16 are read beside zero points: take another checkpoint")
        offsets = (middle - matrix.zeros).repeat_interleave(times, 1)
    scales = scales.repeat_interleave(times, 1)
    for begin in range(0, outputs, PART):
        rows = slice(begin, min(begin + PART, outputs))
        least = None if offsets is None else offsets[rows]
        integers = matrix.integers(rows) if matrix.order is None else matrix.integers(rows)[:, matrix.order]
        yield Quantised(integers, matrix.bits, middle, matrix.values, span, scales[rows], minimum_factor=least)


def fields(words: Tensor, bits: int) -> Tensor:
    """Return the integers of words (..., n) int32, the lowest bits first: (..., n x 32 / bits) uint8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def group_of(size: int, inputs: int) -> int:
    """Return the inputs of a group, given what the settings say: -1 for all of them.

    Raises:
        ModelError: they are no multiple of 32, or do not divide a row.
    """
    group = inputs if size == -1 else size
    if group < 1 or group % GROUP or inputs % group:
        what = f"groups of {group} inputs are to divide rows of {inputs}"
        raise ModelError(f"{what}, and groups are multiples of {GROUP} that do so: take a checkpoint with other groups")
    return group


def order_of(index: Tensor | None, inputs: int, group: int) -> Tensor | None:
    """Return inputs in the order of their groups, given the group of each (K); None if they stand in it.

    Raises:
        ModelError: groups are not of one size.
    """
    if index is None:
        return None
    counts = index.clamp(-1, inputs // group).long().add(1).bincount(minlength=inputs // group + 2)
    if counts[0] or counts[-1] or (counts[1:-1] != group).any():
        raise ModelError(f"its g_idx does not put {group} inputs into each of {inputs // group} groups: get it again")
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order


class Settings:
    """A part of a checkpoint's configuration, with an account of what was asked for.

    Args:
        values: the settings, by name; None stands for one that is not there.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._left = {*self._values}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def forget(self, unused: Sequence[str]) -> None:
        """Take settings that change nothing."""
        self._left.difference_update(unused)

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a setting.

        Raises:
            ModelError: it is of another type, or is missing and there is no default.
        """
        self._left.discard(name)
        found = self._values.get(name, default)
        if type(found) is not kind:
            what = f"its quantization_config says {name} {found!r:.40}"
            raise ModelError(f"{what}, and should be of type {kind.__name__}")
        return found

    def choose(self, name: str, choices: Sequence[T], default: T | None = None) -> T:
        """Return a setting that is one of a few.

        Raises:
            ModelError: it is another one.
        """
        found = self.get(name, type(choices[0]), default)
        found = found.lower() if isinstance(found, str) else found  # type: ignore[assignment]
        if found not in choices:
            what = f"its quantization_config says {name} {found!r:.40}"
            raise ModelError(f"{what}, and {' and '.join(map(str, choices))} are read: take another checkpoint")
        return found

    def check_all_used(self) -> None:
        """Raise `ModelError` if a setting was not asked for."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise ModelError(f"its quantization_config has {some}, which is not read and may change the model")

    def unless(self, name: str, layer: Layer) -> Callable[[str], Layer | None]:
        """Return a function from a module's name to its layer: none for the modules that a setting names."""
        ignored = self.get(name, list, [])
        return lambda module: None if names(module, ignored) else layer


def names(module: str, some: Sequence[object]) -> bool:
    """Whether a module is among some, or inside one of them: names, parts of names, or patterns after "re:"."""
    return any(
        re.match(word[3:], module) is not None if word.startswith("re:") else f".{word}." in f".{module}."
        for word in map(str, some)
    )
