"""Any number of prompts through one run: results as they finish, a few rows at a time.

Knows: which prompts wait, which row is whose, what to do with a bad prompt.
Does not know: how rows join a run (`generation`), how they are decoded.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

from specinfer.engine.generation import Decoder, Run
from specinfer.engine.sequence import Row
from specinfer.errors import SamplingError, SpecinferError
from specinfer.results import Result


class Finished(NamedTuple):
    """One prompt of many: its result, or why it has none."""

    number: int  # of the prompt, from 0
    result: Result | None
    error: SpecinferError | None


def finished(
    decoder: Decoder, prompts: Iterable[Any], row_of: Callable[[Any, int], Row], max_rows: int, keep: bool
) -> Generator[Finished]:
    """Decode prompts and yield them as they finish.

    Args:
        decoder: whose models and rules decode.
        prompts: any number; the next ones are asked for when there is room for them.
        row_of: makes a row of a prompt and its index, or raises a `SpecinferError`: the others go on.
        max_rows: rows decoded at a time.
        keep: whether texts keep the stop string that ended them.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers; ``partial`` holds the rows under way.
    """
    bad: list[Finished] = []
    run = Run(decoder, _rows(prompts, row_of, bad), single=False, max_rows=max_rows)
    run.keep_stop_string = keep
    try:
        for emitted in run:
            yield from _emptied(bad)
            for row, _ in emitted:
                if row.finished:
                    yield Finished(row.index, run.take(row), None)
        yield from bad
    except SpecinferError as error:
        error.partial = tuple(run.results())
        raise
    finally:
        run.close()


def check_joins(row: Row) -> None:
    """Raise `SamplingError` for a row that cannot join others."""
    if row.contrast.alpha:
        raise SamplingError("contrastive search takes all rows at once: use generate, or no penalty_alpha")


def _rows(prompts: Iterable[Any], row_of: Callable[[Any, int], Row], bad: list[Finished]) -> Iterator[Row]:
    """Yield a row for each good prompt, and put the others into a list."""
    for index, prompt in enumerate(prompts):
        try:
            row = row_of(prompt, index)
            check_joins(row)
        except SpecinferError as error:
            bad.append(Finished(index, None, error))
        else:
            yield row


def _emptied(bad: list[Finished]) -> list[Finished]:
    """Return what a list holds, and empty it."""
    held = list(bad)
    bad.clear()
    return held
