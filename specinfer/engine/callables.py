"""The caller's own functions (logits processors, stopping criteria), made ready for one row of a call.

Batching never changes a row's text, nor what a function remembers.  Rows are decoded one by one, at different
lengths, while transformers hands a function all rows at once.  The contract that serves both:

    order    a function is called once for every token of a row's text, in the order of the text
    shapes   ids (B, T) and scores (B, V), for the B rows of the call, as in transformers.  All B are this row; of the
             answer the row's own line counts.  So constraints and biases that differ by row work as they are
    state    an object is copied for each row.  A function is shared, and refused if it keeps state
    factory  what takes one argument is called with the row's number, and returns the row's own function: ids (1, T)

A call with a single row uses the objects themselves.  Each of many prompts (`generate_many`) is a call of its own: a
function that answers two equal rows differently is refused there.

Knows: what functions may remember, which of transformers' classes remember nothing.
Does not know: distributions, when texts end.
"""

import copy
import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from transformers import generation

from specinfer.attention.torch_private import writes
from specinfer.common.tensors import on_device
from specinfer.common.values import plain
from specinfer.engine.excluded import MinLength, MinNewTokens, SuppressTokens
from specinfer.engine.penalties import FrequencyPenalty, PresencePenalty
from specinfer.errors import SamplingError

Function = Callable[..., object]
FUNCTIONS = ("logits_processor", "stopping_criteria")  # names of the options that hold them
ADVICE = "give a function of one argument, the row's number, that returns a function for that row"
CONTAINERS = (list, dict, set, bytearray)
FIXED = (  # types of values that do not change
    *(int, float, complex, str, bytes, tuple, frozenset, range, slice, type(None), type(...), type),
    *(ModuleType, FunctionType, BuiltinFunctionType),
)
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "threading", "re", "regex", "functools", "enum")
# Classes of transformers' that do not read the tokens before a node.
PREFIX_FREE = (
    *(generation.TemperatureLogitsWarper, generation.TopKLogitsWarper, generation.TopPLogitsWarper),
    *(generation.MinPLogitsWarper, generation.TopHLogitsWarper, generation.TypicalLogitsWarper),
    *(generation.EpsilonLogitsWarper, generation.EtaLogitsWarper, generation.LogitNormalization),
    generation.InfNanRemoveLogitsProcessor,
)
# All that remember nothing from call to call, and look at each row by itself.
STATELESS = (
    *PREFIX_FREE,
    *(PresencePenalty, FrequencyPenalty, MinLength, MinNewTokens, SuppressTokens),
    *(generation.SequenceBiasLogitsProcessor, generation.SuppressTokensLogitsProcessor),
    *(generation.NoRepeatNGramLogitsProcessor, generation.NoBadWordsLogitsProcessor),
    *(generation.MinLengthLogitsProcessor, generation.MinNewTokensLengthLogitsProcessor),
    *(generation.ForcedBOSTokenLogitsProcessor, generation.ForcedEOSTokenLogitsProcessor),
    *(generation.ExponentialDecayLengthPenalty, generation.RepetitionPenaltyLogitsProcessor),
    *(generation.SuppressTokensAtBeginLogitsProcessor, generation.MaxLengthCriteria),
    *(generation.MaxTimeCriteria, generation.EosTokenCriteria, generation.StopStringCriteria),
)


class BatchRow(NamedTuple):
    """Which row of a call, and of how many.

    Attributes:
        number: of the row, from 0.
        rows: of the call, B; None for one of many prompts.
    """

    number: int = 0
    rows: int | None = 1

    @property
    def copies(self) -> int:
        """How many rows a function sees: two in place of a number that is not known."""
        return 2 if self.rows is None else self.rows

    @property
    def line(self) -> int:
        """Which of them is the row's own."""
        return 0 if self.rows is None else self.number


class RowFunction:
    """One of the caller's functions at work in one row.

    Args:
        function: of ids (B, T) and scores.
        row: the row's.
    """

    def __init__(self, function: Function, row: BatchRow = BatchRow()) -> None:  # noqa: B008
        self.function, self.row = function, row
        self.captured = _captured(function) if row.rows != 1 and isinstance(function, FunctionType) else ()

    @cached_property
    def stateless(self) -> bool:
        """Whether it is known to be a function of each row's ids and scores alone, so that paths can share a call."""
        return type(self.function) in STATELESS

    @cached_property
    def reads_path(self) -> bool:
        """Whether it may read the tokens before a node."""
        return type(self.function) not in PREFIX_FREE

    def after(self, paths: Sequence[Sequence[int]], scores: Tensor, padding: Sequence[int] = ()) -> Tensor:
        """Return the processed scores (n, V) after n paths: of one length at a time, or each alone, in their order.

        Args:
            paths: ids so far, n of them; () unless it reads them.
            scores: (n, V), which may be changed.
            padding: ids before every path.
        """
        if not self.reads_path:
            return self.scores(scores.new_zeros(len(scores), 0, dtype=torch.long), scores)
        lengths = sorted({len(path) for path in paths})
        together = [[i for i, path in enumerate(paths) if len(path) == length] for length in lengths]
        for rows in together if self.stateless else [[i] for i in range(len(paths))]:
            ids = on_device([[*padding, *paths[i]] for i in rows], scores.device)
            if len(rows) == len(paths):
                return self.scores(ids, scores)
            indices = on_device(rows, scores.device)
            scores[indices] = self.scores(ids, scores[indices])
        return scores

    def scores(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores (n, V) after n paths (n, T), one path unless `stateless`.

        Raises:
            SamplingError: the function returns something else, or keeps what rows would share.
        """
        if self.stateless or self.row.copies == 1:
            return self._checked(self.function(ids, scores), scores.shape)
        copies = self.row.copies
        answer = self._called(ids.repeat(copies, 1), scores.repeat(copies, 1))
        return self._line(self._checked(answer, (copies, scores.shape[1])))[None]

    def stops(self, ids: Tensor) -> bool:
        """Return whether a text (1, T) ends, by a stopping criterion.

        Raises:
            SamplingError: the function says neither yes nor no for this row, or keeps what rows would share.
        """
        copies = 1 if self.stateless else self.row.copies
        answer = plain(self._called(ids.repeat(copies, 1) if copies > 1 else ids, None))
        values = answer if isinstance(answer, list) else [answer] * copies
        if len(values) != copies or not all(isinstance(value, bool | int) for value in values):
            wanted = f"neither True nor False, or one of them for each of {copies} rows"
            raise SamplingError(f"the stopping criterion {self.function!r:.60} returns {answer!r:.60}, {wanted}")
        return bool(self._line(torch.tensor(values, device="cpu"))) if copies > 1 else bool(values[0])

    def _called(self, *given: Tensor | None) -> object:
        """Return the function's answer."""
        before = [*map(_held, self.captured)]
        try:
            answer = self.function(*given)
        except Exception as error:
            if self.row.copies > 1:
                error.add_note(f"{self.function!r:.60} was called for {self.row.copies} equal rows: else {ADVICE}")
            raise
        if not all(map(_same, before, map(_held, self.captured))):
            raise SamplingError(f"{self.function!r:.60} changes what it holds, and rows would share that: {ADVICE}")
        return answer

    def _checked(self, answer: object, shape: Sequence[int]) -> Tensor:
        """Return scores; raise `SamplingError` for anything else."""
        if isinstance(answer, Tensor) and answer.shape == torch.Size(shape):
            return answer
        found = f"{tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r:.40}"
        wanted = f"scores {tuple(shape)}: return those that came in, changed"
        raise SamplingError(f"the logits processor {self.function!r:.60} returns {found} in place of {wanted}")

    def _line(self, answer: Tensor) -> Tensor:
        """Return the row's own line of an answer."""
        if self.row.rows is None and not torch.equal(answer[0], answer[1]):
            raise SamplingError(
                f"{self.function!r:.60} answers equal rows differently, and each of many prompts is a call of its own: "
                f"give it with its prompt, or {ADVICE}"
            )
        return answer[self.row.line]


def as_functions(name: str, value: object) -> tuple[Function | RowFunction, ...]:
    """Return one function, several (also lists in lists) or None as a tuple.

    Raises:
        SamplingError: something else, a class, or what takes neither ids and scores nor a row's number.
    """
    found: list[Function | RowFunction] = []
    for item in _flat(value):
        if not (isinstance(item, RowFunction) or _takes(item, 2) or _takes(item, 1)):
            raise SamplingError(f"{name} holds {item!r:.60}, which takes no ids and scores: give functions that do")
        found.append(item)
    return tuple(found)


def for_row(row: BatchRow, *groups: Iterable[Function | RowFunction]) -> tuple[tuple[RowFunction, ...], ...]:
    """Return groups of functions for one row.  An object in several of them is copied once.

    Raises:
        SamplingError: a function keeps state that rows would share, cannot be copied, or a factory returns no function.
    """
    memo: dict[int, object] = {}
    return tuple(tuple(_of_row(function, row, memo) for function in group) for group in groups)


def _of_row(function: Any, row: BatchRow, memo: dict[int, object]) -> RowFunction:
    """Return one function for a row."""
    if isinstance(function, RowFunction):
        return function
    if not _takes(function, 2):
        try:
            made = function(row.number)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise SamplingError(f"{function!r:.60} takes one argument, row number {row.number}: {reason}") from error
        if not _takes(made, 2):
            raise SamplingError(
                f"{function!r:.60} returned {made!r:.40} for row {row.number}, which takes no ids and scores"
            )
        return RowFunction(made, BatchRow())
    if isinstance(function, generation.PrefixConstrainedLogitsProcessor) and row != BatchRow():
        allowed = function._prefix_allowed_tokens_fn
        numbered = generation.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row.number, ids), 1)
        return RowFunction(numbered, BatchRow())
    if isinstance(ignored := getattr(function, "prompt_ignore_length", None), Tensor) and row.rows:
        function = copy.copy(function)  # transformers' repetition penalty holds every row's padding
        function.prompt_ignore_length = int(ignored[row.number])
    if row.rows == 1 or type(function) in STATELESS or isinstance(function, BuiltinFunctionType):
        return RowFunction(function, row)
    if isinstance(function, FunctionType):
        if written := _written(function.__code__):
            raise SamplingError(f"{function!r:.60} keeps {written}, and rows would share it: {ADVICE}")
        if hidden := next(filter(_is_hidden, _reached(function)), None):
            raise SamplingError(f"{function!r:.60} holds {hidden!r:.60}, whose state rows would share: {ADVICE}")
        return RowFunction(function, row)
    return RowFunction(_copied(function, memo), row)


def _copied(function: Function, memo: dict[int, object]) -> Function:
    """Return a copy of an object, with models and tokenizers that it holds shared."""
    holder = getattr(function, "__self__", function)
    for held in vars(holder).values() if hasattr(holder, "__dict__") else ():
        if isinstance(held, torch.nn.Module) or hasattr(held, "convert_ids_to_tokens"):
            memo[id(held)] = held
    try:
        return copy.deepcopy(function, memo)
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise SamplingError(f"{function!r:.60} cannot be copied for each row ({reason}): {ADVICE}") from error


def _flat(value: object) -> Iterator[object]:
    """Yield the items of a list, and of transformers' lists in it; none for None."""
    if value is None:
        return
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, generation.LogitsProcessorList | generation.StoppingCriteriaList):
            yield from _flat(item)
        else:
            yield item


def _takes(function: object, count: int) -> TypeGuard[Function]:
    """Whether a value is a function, not a class, that takes this many arguments, as far as it says."""
    if not callable(function) or isinstance(function, type):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return count == 2
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _written(code: CodeType) -> str:
    """Return the name of a variable outside of a function that its code sets, "" if there is none."""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return str(step.argval)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            return str(step.argval)
    return ""


def _reached(function: FunctionType) -> Iterator[object]:
    """Yield what a function could keep state in: what it closes over, its defaults, globals that it names."""
    found = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    for value in found:
        yield getattr(value, "__self__", value) if inspect.ismethod(value) else value


def _captured(function: FunctionType) -> tuple[object, ...]:
    """Return those of these values whose changes can be seen, and the function's attributes."""
    return (vars(function), *filter(_can_change, _reached(function)))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a variable that is set later
        return False


def _is_of_library(value: object) -> bool:
    """Whether a value's class belongs to a library whose objects change only internally, as caches do."""
    return type(value).__module__.split(".")[0] in LIBRARIES


def _can_change(value: object) -> bool:
    """Whether a value is a container, a tensor, or an object of a class of the caller's, whose changes can be seen."""
    if isinstance(value, (*CONTAINERS, Tensor)):
        return True
    return not isinstance(value, FIXED) and not _is_of_library(value) and hasattr(value, "__dict__")


def _is_hidden(value: object) -> bool:
    """Whether a value may keep state that cannot be seen: iterators, objects of compiled code."""
    return not (isinstance(value, FIXED) or _can_change(value) or _is_of_library(value))


def _held(value: object) -> list[object]:
    """Return what a container or an object holds now; of a tensor, how often it was written to."""
    if isinstance(value, Tensor):
        return [] if value.is_inference() else [writes(value)]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, CONTAINERS) else [*vars(value).values()]


def _same(before: list[object], after: list[object]) -> bool:
    """Whether the same things are held."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(a is b or (isinstance(a, int) and a == b) for a, b in pairs)
