"""From a user's prompts (text, chat messages or token ids, one or many) to checked rows of token ids.

Knows: files of prompts, the tokenizer and its chat template, attention masks, sizes of vocabulary and context.
Does not know: options, decoding.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel, running
from specinfer.common.chat import ChatOptions, begins_as_rendered, rendered
from specinfer.common.files import expanded, parse_json
from specinfer.common.records import Record
from specinfer.common.values import plain
from specinfer.errors import InputError, one_line

LISTED = 5  # lines of a file that a message names
PROBED = 8  # tokens that a model reads to find out whether token types of 0 change anything
OnePrompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, object]]  # text, token ids or chat messages
Prompt: TypeAlias = object  # one, a batch, arrays, or what a tokenizer returns; see `encode`


class Inputs(TypedDict, total=False):
    """What a tokenizer returns, by name.

    Attributes:
        input_ids: token ids, instead of the prompt.
        attention_mask: 0 where token ids are padding, in their shape.
        token_type_ids: in the same shape; accepted if they change nothing.
        position_ids: likewise.
    """

    input_ids: object
    attention_mask: object
    token_type_ids: object
    position_ids: object


def read_rows(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield line numbers, from 1, and objects of a file of JSON lines with "prompt"; skip blank lines.

    Raises:
        InputError: the file cannot be read, or a line is not such an object.
    """
    for number, row in read_objects(path):
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f'{path}, line {number} has no "prompt" with text in it: give each line one')
        if not is_text(prompt):
            raise InputError(f"{path}, line {number} holds half a surrogate pair, which is not text")
        yield number, row


def read_objects(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield line numbers, from 1, and objects of a file of JSON lines; skip blank lines.

    Raises:
        InputError: the file cannot be read; or, at its end, some lines are no objects: names them.
    """
    wrong = []
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            wrong.append(f"line {number} is not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            wrong.append(f"line {number} is no object")
    if wrong:
        more = f", and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise InputError(f'{path}, {", ".join(wrong[:LISTED])}{more}: give an object with "prompt" on each line')


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines.  Only newlines end a line: text may hold other line separators.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        yield from enumerate(expanded(path).read_text(encoding="utf-8").split("\n"), 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({getattr(error, 'strerror', None) or error})") from error


def is_text(prompt: str) -> bool:
    """Return whether a string holds characters only: JSON may hold half a surrogate pair, which is not one."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


class Padded(NamedTuple):
    """A row of token ids without its padding, and the padding."""

    left: list[int]
    ids: list[int]
    right: list[int]


class Prompts(NamedTuple):
    """Rows of token ids, and whether the caller gave one prompt or a batch."""

    padded: list[Padded]
    single: bool
    notes: Sequence[str] = ()  # per row, what was decided about it, or nothing

    @property
    def rows(self) -> list[list[int]]:
        """The token ids without padding."""
        return [row.ids for row in self.padded]

    @property
    def only(self) -> list[int]:
        """The token ids of the caller's one prompt.

        Raises:
            InputError: they are a batch.
        """
        if not self.single:
            raise InputError("it is a list of prompts: give each its own place")
        return self.padded[0].ids


def encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None = None,
    raw: bool = False,
    mask: object = None,
    pad: int | None = None,
    chat: ChatOptions = ChatOptions(),  # noqa: B008
) -> Prompts:
    """Turn one prompt or a batch of prompts into token ids.

    Args:
        prompt: a string; chat messages (a list of dicts with "role" and "content"); token ids (a list of ints or a
            1-D tensor); or a list (2-D tensor) of those for a batch.
        tokenizer: needed for text and messages.
        raw: feed strings as they are; otherwise a string is a user's message if the tokenizer has a chat template,
            unless it begins with the special token that this template begins with: then the template wrote it.
        mask: 0 where token ids are padding, in their shape.
        pad: the padding token, if known.
        chat: how messages become a prompt.

    Raises:
        InputError: an empty prompt or row, an unknown kind of prompt, text without a tokenizer, a mask with holes, or
            token ids that look padded and have no mask.
    """
    prompt = plain(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InputError(f"a prompt must be text, chat messages or token ids, or a list of those, not {prompt!r:.60}")
    if not prompt:
        raise InputError("the prompt is empty: there is nothing to continue")
    single = isinstance(prompt, str) or isinstance(prompt[0], int | Mapping)
    items = [prompt] if single else prompt
    written = ["" if raw or not isinstance(item, str) else begins_as_rendered(item, tokenizer) for item in items]
    rows = [_encode_one(item, tokenizer, raw or bool(by), chat) for item, by in zip(items, written, strict=True)]
    for index, row in enumerate(rows):
        if not row:
            which = "the prompt" if single else f"row {index} of the batch"
            raise InputError(f"{which} is empty: every prompt needs at least one token")
    if mask is None:
        _check_padding([row for row, item in zip(rows, items, strict=True) if not _is_text(item)], pad)
    elif single:
        mask = [mask]
    notes = [by and f"the prompt begins with {by}, as the chat template does, so it is fed as it is" for by in written]
    return Prompts(without_padding(rows, mask), single, notes)


def check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise `InputError` for a token id that is not a whole number in [0, vocab_size), naming row and position."""
    for index, row in enumerate(rows):
        for position, token in enumerate(row):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                where, vocabulary = f"row {index}, position {position}", f"the target's vocabulary [0, {vocab_size})"
                raise InputError(f"{where}: token id {token!r} is not in {vocabulary}: use the target's tokenizer")


def _check_padding(rows: Sequence[Sequence[object]], pad: int | None) -> None:
    """Raise `InputError` if rows of token ids look padded.

    A text may also begin or end with the pad token.  It is padding if it is there twice, or if all rows have the same
    length and only some of them have it.
    """
    for ends in ([list(row[:2]) for row in rows], [list(row[:-3:-1]) for row in rows]):
        some = len({len(row) for row in rows}) == 1 and len({end[0] == pad for end in ends}) == 2
        for index, end in enumerate(ends):
            if pad is not None and (end == [pad, pad] or (some and end[0] == pad)):
                advice = "give attention_mask=, all ones if it is text"
                raise InputError(f"row {index} looks padded (token {pad} at its end): {advice}")


def _is_text(item: object) -> bool:
    """Return whether a prompt is text or chat messages, not token ids."""
    return isinstance(item, str) or (isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping))


def _encode_one(item: Any, tokenizer: PreTrainedTokenizerBase | None, raw: bool, chat: ChatOptions) -> list[int]:
    if isinstance(item, str):
        if not item.strip():
            return []
        if raw or not getattr(_required(tokenizer), "chat_template", None):
            _check_unused(chat, "text that no chat template is applied to")
            return tokenized(item, tokenizer)
        item = [{"role": "user", "content": item}]
    if _is_text(item):
        if not getattr(_required(tokenizer), "chat_template", None):
            raise InputError("chat messages need a chat template, and this tokenizer has none: pass text instead")
        return _ids(lambda: rendered(item, tokenizer, chat))
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        _check_unused(chat, "token ids")
        return list(item)
    raise InputError(f"a prompt must be text, chat messages or token ids, not {type(item).__name__}")


def _check_unused(chat: ChatOptions, what: str) -> None:
    """Raise `InputError` if an option of messages comes with something else."""
    if named := next((name for name, value in chat.items() if value is not None), ""):
        raise InputError(f"{named} is of chat messages, and the prompt is {what}: leave it out, or give messages")


def tokenized(text: str, tokenizer: PreTrainedTokenizerBase | None, **options: Any) -> list[int]:
    """Return the token ids of a text, without a chat template.

    A text that begins with the beginning-of-sequence token gets no second one.

    Raises:
        InputError: there is no tokenizer, or it refuses the text.
    """
    ids = _ids(lambda: _required(tokenizer)(text, **options))
    token, written = getattr(tokenizer, "bos_token_id", None), str(getattr(tokenizer, "bos_token", None))
    begun = _repeated(text, written)
    return ids[max(0, _repeated(ids, [token]) - begun) :] if begun else ids


def _repeated(values: Sequence[object], part: Sequence[object]) -> int:
    """Return how many times text or ids begin with the same part."""
    count = 0
    while part and values[count * len(part) : (count + 1) * len(part)] == part:
        count += 1
    return count


def _ids(encoding: Callable[[], Any]) -> list[int]:
    """Return the token ids that a tokenizer returns."""
    try:
        return list(encoding()["input_ids"])
    except InputError:
        raise
    except (TypeError, ValueError, TemplateError) as error:  # half a surrogate pair; messages a template refuses
        advice = "give whole text, or other messages"
        raise InputError(f"the tokenizer refuses this prompt ({one_line(error)}): {advice}") from error


def _required(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise InputError("text needs a tokenizer: construct the decoder with one, or pass token ids")
    return tokenizer


def without_padding(rows: Sequence[Sequence[int]], mask: object) -> list[Padded]:
    """Separate rows of token ids from their padding, where the attention mask is 0.

    Args:
        rows: token ids.
        mask: one row of 0 and 1 for each row of ids; None = no padding.

    Raises:
        InputError: the mask has another shape or other values, a hole, or nothing but padding.
    """
    if mask is None:
        return [Padded([], list(row), []) for row in rows]
    padded = []
    for index, (ids, kept) in enumerate(zip(rows, _one_per_token("attention_mask", mask, rows), strict=True)):
        if not all(value in (0, 1) for value in kept):
            raise InputError(f"row {index}: attention_mask holds other numbers than 0 and 1, and only marks padding")
        if 1 not in kept:
            raise InputError(f"row {index} is empty: its attention_mask calls every token padding")
        start, end = kept.index(1), len(kept) - kept[::-1].index(1)
        if 0 in kept[start:end]:
            raise InputError(f"row {index}: attention_mask has a hole: only the ends of a row can be padding")
        padded.append(Padded(list(ids[:start]), list(ids[start:end]), list(ids[end:])))
    return padded


def _one_per_token(name: str, values: object, rows: Sequence[Sequence[int]]) -> list[list[object]]:
    """Return values as one list per row of ids, each as long as its row; one row of values may serve all.

    Raises:
        InputError: they have another shape.
    """
    lists = plain(values)
    if isinstance(lists, list | tuple) and len(lists) == 1 < len(rows):
        lists = [lists[0]] * len(rows)
    known = isinstance(lists, list | tuple) and all(isinstance(row, list | tuple) for row in lists)
    if not known or list(map(len, lists)) != list(map(len, rows)):
        raise InputError(f"{name} does not have the shape of the token ids: give one number per token")
    return [list(row) for row in lists]


def check_beside(beside: Mapping[str, object], rows: Sequence[Padded], model: TreeModel) -> None:
    """Raise `InputError` for an input beside ids and mask that would change the text; decoding ignores them all.

    Position ids must count each row's tokens from 0.  A model that takes token types must answer the same with types of
    0 and without types.
    """
    values = {name: value for name, value in beside.items() if value is not None}
    for name in values:
        if name not in ("position_ids", "token_type_ids"):
            raise InputError(f"{name} cannot be used: trees are decoded from token ids alone, so leave it out")
    everything = [[*row.left, *row.ids, *row.right] for row in rows]
    given = {name: _one_per_token(name, value, everything) for name, value in values.items()}
    for row, positions in zip(rows, given.get("position_ids", []), strict=False):
        start = len(row.left)
        if positions[start : start + len(row.ids)] != list(range(len(row.ids))):
            raise InputError("position_ids must count each row's tokens from 0, without padding: give none")
    types = given.get("token_type_ids")
    if types is None or "token_type_ids" not in inspect.signature(model.model.forward).parameters:
        return
    if any(map(any, types)) or not _ignores_zero_types(model, rows[0].ids[:PROBED]):
        raise InputError(f"token_type_ids change what {model.name} answers, and decoding does not use them: give none")


def _ignores_zero_types(model: TreeModel, ids: Sequence[int]) -> bool:
    """Return whether a model answers the same, bit for bit, with token types of 0 and without any."""
    tokens = torch.tensor([list(ids)], device=model.device)
    with running(model):
        without, zeros = (model.model(tokens, **extra).logits for extra in ({}, {"token_type_ids": tokens * 0}))
    return torch.equal(without, zeros)
