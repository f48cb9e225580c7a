"""From what a user has (text, chat messages, token ids, one or many) to rows of token ids, checked.

Knows: files of prompts, the tokenizer and its chat template, the size of the vocabulary and of the context.
Does not know: models, decoding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from specinfer.errors import InputError
from specinfer.files import parse_json
from specinfer.inputs import Padded, plain, without_padding

Prompt = Any  # str | list[int] | list[{"role", "content"}]; see `encode`


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers, from 1, and objects of a file of JSON lines with "prompt"; blank lines are left out.

    Raises:
        InputError: the file cannot be read, or a line is no such object.
    """
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON ({error}): give one object a line") from error
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(
                f'{path}, line {number} has no "prompt" with text in it: give one object a line, each with one'
            )
        if not is_text(prompt):
            raise InputError(f"{path}, line {number} holds half a surrogate pair, which is no text")
        yield number, row


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines: what newlines part, for text may hold other line ends.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        yield from enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({getattr(error, 'strerror', None) or error})") from error


def is_text(prompt: str) -> bool:
    """Whether a string holds characters only: halves of surrogate pairs, which JSON lets through, are none."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


class Prompts(NamedTuple):
    """Rows of token ids, and whether the caller gave one prompt or a batch."""

    padded: list[Padded]
    single: bool

    @property
    def rows(self) -> list[list[int]]:
        """The token ids without padding."""
        return [row.ids for row in self.padded]


def encode(
    prompt: Prompt, tokenizer: Any = None, raw: bool = False, mask: Any = None, pad: int | None = None
) -> Prompts:
    """Turn one prompt or a batch of prompts into token ids.

    Args:
        prompt: a string; chat messages (a list of dicts with "role" and "content"); token ids (a list of ints or a
            1-D tensor); or a list (2-D tensor) of those for a batch.
        tokenizer: needed for text and messages.
        raw: feed strings as they are; otherwise a string is a user's message if the tokenizer has a chat template.
        mask: 0 where token ids are padding, in their shape.
        pad: the token that token ids are padded with, if known.

    Raises:
        InputError: an empty prompt or row, an unknown kind of prompt, text without a tokenizer, a mask with holes, or
            token ids that look padded and have no mask.
    """
    prompt = plain(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InputError(
            f"a prompt must be text, a list of chat messages, or token ids (or a list of those), not {prompt!r:.60}"
        )
    if not prompt:
        raise InputError("the prompt is empty: there is nothing to continue")
    single = isinstance(prompt, str) or isinstance(prompt[0], int | Mapping)
    items = [prompt] if single else prompt
    rows = [_encode_one(item, tokenizer, raw) for item in items]
    for index, row in enumerate(rows):
        if not row:
            which = "the prompt" if single else f"row {index} of the batch"
            raise InputError(f"{which} is empty: every prompt needs at least one token")
    if mask is None:
        _check_padding([row for row, item in zip(rows, items, strict=True) if not _is_text(item)], pad)
    elif single:
        mask = [mask]
    return Prompts(without_padding(rows, mask), single)


def check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise `InputError` for a token id that is no whole number in [0, vocab_size), naming row and place."""
    for index, row in enumerate(rows):
        for place, token in enumerate(row):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise InputError(
                    f"row {index}, place {place}: token id {token!r} is not in the target's vocabulary "
                    f"[0, {vocab_size}): encode the prompt with the target's own tokenizer"
                )


def check_context(rows: Sequence[Sequence[int]], budgets: Sequence[int], limit: int | None) -> None:
    """Raise `InputError` where prompt + new tokens exceed the positions the target can use."""
    for index, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        if limit is not None and len(row) + budget > limit:
            raise InputError(
                f"row {index}: {len(row)} prompt tokens + {budget} new ones exceed the target's context of {limit}: "
                f"shorten the prompt or ask for at most {max(limit - len(row), 0)} new tokens"
            )


def _check_padding(rows: Sequence[Sequence[Any]], pad: int | None) -> None:
    """Raise `InputError` where rows of token ids look padded.

    The pad token may also begin or end texts: it is padding where it stands twice, or in some rows of a length only.
    """
    for ends in ([list(row[:2]) for row in rows], [list(row[:-3:-1]) for row in rows]):
        some = len({len(row) for row in rows}) == 1 and len({own[0] == pad for own in ends}) == 2
        for index, own in enumerate(ends):
            if pad is not None and (own == [pad, pad] or (some and own[0] == pad)):
                raise InputError(
                    f"row {index} looks padded (token {pad} at its end): give attention_mask=, all ones if it is text"
                )


def _is_text(item: Any) -> bool:
    """Whether a prompt is text or chat messages, not token ids."""
    return isinstance(item, str) or (isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping))


def _encode_one(item: Any, tokenizer: Any, raw: bool) -> list[int]:
    if isinstance(item, str):
        if not item.strip():
            return []
        if raw or not getattr(_needed(tokenizer), "chat_template", None):
            return spelt(item, tokenizer)
        item = [{"role": "user", "content": item}]
    if _is_text(item):
        if not getattr(_needed(tokenizer), "chat_template", None):
            raise InputError("chat messages need a chat template, and this tokenizer has none: pass text instead")
        whole = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return _ids(lambda: tokenizer.apply_chat_template(list(item), **whole))
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return list(item)
    raise InputError(f"a prompt must be text, chat messages or token ids, not {type(item).__name__}")


def spelt(text: str, tokenizer: Any, **options: Any) -> list[int]:
    """Return the token ids of a text as it is, by the tokenizer's own options.

    Raises:
        InputError: no tokenizer, or one that refuses the text.
    """
    return _ids(lambda: _needed(tokenizer)(text, **options))


def _ids(encoding: Callable[[], Any]) -> list[int]:
    """Return the token ids that a tokenizer makes."""
    try:
        return list(encoding()["input_ids"])
    except (TypeError, UnicodeError, TemplateError) as error:  # half a surrogate pair; messages a template refuses
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"the tokenizer refuses this prompt ({reason}): give whole text, or other messages") from error


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InputError("text needs a tokenizer: construct the decoder with one, or pass token ids")
    return tokenizer
