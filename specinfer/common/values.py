"""Checks of single arguments and of packages, and numbers of numpy and torch as Python's own.

Knows: flags, counts, temperatures, names, arrays.  Does not know: prompts, options, decoding.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any

from specinfer.errors import InputError


def installed(module: str, problem: str) -> ModuleType:
    """Import a module of a package that users install if they need it; raise `InputError` where it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"{problem}: pip install {module.partition('.')[0]}") from error


def plain(value: Any) -> Any:
    """Return a value with numpy's and torch's numbers as Python's, and arrays and tensors as lists, at any depth."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def mapped(value: object, change: Callable[[object], object]) -> object:
    """Return a value with whatever stands in its lists and dicts, at any depth, changed; tuples become lists."""
    if isinstance(value, Mapping):
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    return change(value)


def checked_flag(name: str, value: object) -> bool:
    """Return a flag; raise `InputError` if it is neither True nor False."""
    if not isinstance(flag := plain(value), bool):
        raise InputError(f"{name}={value!r:.60} is neither True nor False: give one of them")
    return flag


def checked_count(name: str, value: object, least: int, advice: str = "") -> int:
    """Return a whole number; raise `InputError` for anything else, for less than the least and over 32 bits."""
    count = plain(value)
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count < 2**31:
        raise InputError(f"{name}={value!r:.60} {advice or 'is not a count'}: give a whole number, at least {least}")
    return count


def checked_logprobs(value: object) -> int | None:
    """Return how many of the likeliest tokens an option of log-probabilities asks for: 0 for True, None for False.

    Raises:
        InputError: it is neither True or False nor a count.
    """
    count = plain(value)
    if isinstance(count, bool):
        return 0 if count else None
    return checked_count("logprobs", value, 1, "is neither True nor False, nor a count of the likeliest tokens")


def checked_temperature(value: object) -> float:
    """Return a temperature; raise `InputError` for anything else."""
    temperature = plain(value)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < inf:
        raise InputError(f"temperature={value!r:.60}: 0 is greedy, others must be positive and finite")
    return temperature


def checked_names(name: str, *values: object) -> None:
    """Raise `InputError` for a value that is neither text nor a path."""
    for value in values:
        if not isinstance(value, str | os.PathLike):
            raise InputError(f"{name}: {value!r:.60} is not a name or a path")
