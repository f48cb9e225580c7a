"""What callers give, made plain: numbers of numpy and torch, padding, and what stands beside token ids.

Knows: tensors and arrays, attention masks, what tokenizers and transformers' `generate` hand to a model.
Does not know: prompts, options, decoding.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from specinfer.errors import InputError

if TYPE_CHECKING:
    from specinfer.attention import TreeModel

FIRST = 8  # tokens that a model is asked about when its token types are in question


class Padded(NamedTuple):
    """A row of token ids, parted."""

    left: list[int]
    ids: list[int]
    right: list[int]

    @property
    def whole(self) -> list[int]:
        """The row as it was given."""
        return self.left + self.ids + self.right


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


def without_padding(rows: Sequence[Sequence[int]], mask: Any) -> list[Padded]:
    """Part rows of token ids where their attention mask is 0 at either end.

    Args:
        rows: token ids.
        mask: one row of 0 and 1 for each row of ids; None = no padding.

    Raises:
        InputError: the mask has another shape or other values, a hole, or nothing but padding.
    """
    if mask is None:
        return [Padded([], list(row), []) for row in rows]
    masks = alike("attention_mask", mask, rows)
    return [_parted(index, row, kept) for index, (row, kept) in enumerate(zip(rows, masks, strict=True))]


def alike(name: str, values: Any, rows: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return values as one list per row of ids, each as long as its row; one row of values may serve all.

    Raises:
        InputError: they have another shape.
    """
    own = plain(values)
    if isinstance(own, list | tuple) and len(own) == 1 < len(rows):
        own = [own[0]] * len(rows)
    fits = isinstance(own, list | tuple) and len(own) == len(rows)
    if not fits or not all(
        isinstance(v, list | tuple) and len(v) == len(row) for v, row in zip(own, rows, strict=True)
    ):
        raise InputError(f"{name} has not the shape of the token ids: give one number per token")
    return [list(row) for row in own]


def check_positions(positions: Any, rows: Sequence[Padded]) -> None:
    """Raise `InputError` for position ids that do not count each row's tokens from 0, which is how rows are read."""
    for row, own in zip(rows, alike("position_ids", positions, [row.whole for row in rows]), strict=True):
        start = len(row.left)
        if own[start : start + len(row.ids)] != list(range(len(row.ids))):
            raise InputError(
                "position_ids cannot be used unless they count each row's tokens from 0, padding left out: give none"
            )


def check_types(types: Any, rows: Sequence[Padded], model: TreeModel) -> None:
    """Raise `InputError` for token types that would change what the model answers: decoding gives it none.

    A model that takes types is asked whether zeros are the same to it as none, about a few tokens.
    """
    given = alike("token_type_ids", types, [row.whole for row in rows])
    if "token_type_ids" not in inspect.signature(model.model.forward).parameters:
        return
    if any(map(any, given)) or not _zeros_are_none(model, rows[0].ids[:FIRST]):
        raise InputError(
            f"token_type_ids change what {model.name} answers, and trees are decoded from token ids alone: give none"
        )


def check_beside(beside: Mapping[str, Any], rows: Sequence[Padded], model: TreeModel) -> None:
    """Raise `InputError` for anything beside ids and mask that would change the text if it were dropped."""
    given = {name: value for name, value in beside.items() if value is not None}
    for name in given:
        if name not in ("position_ids", "token_type_ids"):
            raise InputError(f"{name} cannot be used: trees are decoded from token ids alone, so leave it out")
    if "position_ids" in given:
        check_positions(given["position_ids"], rows)
    if "token_type_ids" in given:
        check_types(given["token_type_ids"], rows, model)


def _parted(index: int, ids: Sequence[int], kept: Sequence[Any]) -> Padded:
    if not all(value in (0, 1) for value in kept):
        raise InputError(f"row {index}: attention_mask holds other numbers than 0 and 1, and only says what is padding")
    if 1 not in kept:
        raise InputError(f"row {index} is empty: its attention_mask calls every token padding")
    start, end = kept.index(1), len(kept) - kept[::-1].index(1)
    if 0 in kept[start:end]:
        raise InputError(f"row {index}: attention_mask has a hole: only padding at the ends of a row can be left out")
    return Padded(list(ids[:start]), list(ids[start:end]), list(ids[end:]))


def _zeros_are_none(model: TreeModel, ids: Sequence[int]) -> bool:
    """Whether a model answers the same, bit for bit, with token types of zero and without any."""
    import torch

    from specinfer.attention import running

    tokens = torch.tensor([list(ids)], device=model.device)
    with running(model):
        without, zeros = (model.model(tokens, **extra).logits for extra in ({}, {"token_type_ids": tokens * 0}))
    return torch.equal(without, zeros)
