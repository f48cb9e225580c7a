"""What callers give, made plain: numbers of numpy and torch, padding, and what stands beside token ids.

Knows: tensors and arrays, attention masks, what tokenizers and transformers' `generate` hand to a model.
Does not know: prompts, options, decoding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from specinfer.errors import InputError

if TYPE_CHECKING:
    pass

Progress = Callable[[list[Any], int], Iterable[Any]]  # (work left, number done) -> the work, one by one


def plain(value: Any) -> Any:
    """Return a value with the numbers of numpy and torch in it as Python's own, and arrays and tensors as lists."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(own) for key, own in value.items()}
    return value


def checked_flag(name: str, value: Any) -> bool:
    """Return a flag; raise `InputError` for what is neither True nor False."""
    if not isinstance(flag := plain(value), bool):
        raise InputError(f"{name}={value!r:.60} is neither True nor False: give one of them")
    return flag


def checked_count(name: str, value: Any, least: int, advice: str = "") -> int:
    """Return a whole number; raise `InputError` for anything else, and for less than the least or over 32 bits."""
    count = plain(value)
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count < 2**31:
        raise InputError(f"{name}={value!r:.60} {advice or 'is no count'}: give a whole number, at least {least}")
    return count


def checked_temperature(value: Any) -> float:
    """Return a temperature; raise `InputError` for what is none."""
    own = plain(value)
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own < inf:
        raise InputError(f"temperature={value!r:.60}: 0 is greedy, others must be positive and finite")
    return own


def checked_names(name: str, *values: Any) -> None:
    """Raise `InputError` for a value that is neither text nor a path."""
    for value in values:
        if not isinstance(value, str | os.PathLike):
            raise InputError(f"{name}: {value!r:.60} is no name and no path")
