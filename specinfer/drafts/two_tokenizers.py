"""Text between two tokenizers: a target's tokens as a draft's, and text as the target's.

Knows: both token tables, the bytes that tokens stand for, how each tokenizer cuts text.
Does not know: models, trees, chat templates.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from specinfer.common.records import Record
from specinfer.common.token_bytes import BYTE, token_texts
from specinfer.errors import TokenizerMismatch

KEPT = 64  # bytes at a text's end, at least, that may still be cut into other tokens
TAIL = 8  # committed tokens at a row's end that text is cut together with; a character has 4 at most


class Translation:
    """How a target's tokens become a draft's, and text that follows committed tokens becomes the target's.

    Args:
        target, draft: the ``transformers`` tokenizers.
        name: the draft's, for messages.
        size, draft_size: of the vocabularies of their models.

    Raises:
        TokenizerMismatch: a table that cannot be read as text, or no text that both know.

    Attributes:
        texts: of the target's tokens: bytes, or the name of a special token.
        draft_texts: of the draft's.
        shared: the draft's ids by the target's, of the tokens that both know.
        pieces: the draft's ids of single bytes, by byte.
        encoder: the draft's tokenizer, which adds nothing to a text.
        target_encoder: the target's, which adds nothing either.
        first: the draft's ids before every text.
        dropped: the target's ids that say nothing to the draft: what begins a text and padding.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str, size: int, draft_size: int
    ) -> None:
        self.texts = texts = _read(target, "the target", size)
        self.draft_texts = theirs = _read(draft, f"draft {name}", draft_size)
        ids, numbers = _by_text(draft, theirs), _by_text(target, texts)
        shared = {numbers[text]: ids[text] for text in numbers.keys() & ids.keys()}
        if not any(isinstance(texts[token], bytes) for token in shared):
            problem = f"draft {name} shares no token's text with the target"
            raise TokenizerMismatch(f"{problem}, so it could propose nothing: choose another draft")
        end, draft_end = target.eos_token_id, draft.eos_token_id
        if end in texts and draft_end in theirs and end not in shared and draft_end not in shared.values():
            shared[end] = draft_end
        self.shared = shared
        self.dropped = frozenset({target.bos_token_id, target.pad_token_id} - shared.keys() - {None})
        self.pieces = {text[0]: token for text, token in ids.items() if isinstance(text, bytes) and len(text) == 1}
        first = draft("")["input_ids"][:1]
        self.first: list[int] = first if first == [draft.bos_token_id] else []
        self.encoder, self.target_encoder = bare_encoder(draft), bare_encoder(target)

    def encode(self, text: bytes) -> list[int]:
        """Return the draft's tokens of a text; those of a last character that is not complete are single bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        complete = decoder.decode(text)
        rest, _ = decoder.getstate()
        ids: list[int] = self.encoder.encode(complete, add_special_tokens=False).ids if complete else []
        return ids + [self.pieces[byte] for byte in rest if byte in self.pieces]

    def tail(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens, as many as begin with a character and are all text."""
        tail: list[int] = []
        for token in tokens[-TAIL:]:
            text = self.texts.get(token)
            tail = [*tail, token] if isinstance(text, bytes) else []
        while tail and self._text(tail)[:1] >= b"\x80" and self._text(tail)[:1] < b"\xc0":  # within a character
            del tail[0]
        return tail

    def cut(self, tail: Sequence[int], text: bytes) -> list[int]:
        """Return the tokens of a text without its last character if that is not complete.

        They are those that follow the tail in the text of both.  If it would be cut in another way together, the text
        is cut alone.
        """
        for before in (list(tail), []):
            ids = self._encoded(self._text(before) + text)
            if ids[: len(before)] == before:
                return list(takewhile(lambda token: isinstance(self.texts.get(token), bytes), ids[len(before) :]))
        return []

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(text for token in tokens if isinstance(text := self.texts[token], bytes))

    def _encoded(self, text: bytes) -> list[int]:
        """Return the tokens of the complete characters; none if it is not UTF-8."""
        try:
            complete = codecs.getincrementaldecoder("utf-8")().decode(text)
        except UnicodeDecodeError:
            return []
        return self.target_encoder.encode(complete, add_special_tokens=False).ids


class RowText:
    """One row's text as the draft's tokens."""

    def __init__(self, translation: Translation, ids: Iterable[int]) -> None:
        self.translation = translation
        self.settled: list[int] = []  # the draft's ids of what more text does not change
        self.open = b""  # text after it
        self.extend(ids)
        first = translation.first
        if self.settled[: len(first)] != first:
            self.settled = first + self.settled

    @property
    def ids(self) -> list[int]:
        """The draft's ids of the whole text; of a text that says nothing to the draft, one of any kind."""
        return self.settled + self.translation.encode(self.open) or [0]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of the target."""
        known = self.translation
        for token in tokens:
            text = known.texts.get(token, b"")  # ids beyond the table say nothing
            if isinstance(text, bytes):
                self.open += text
            elif token in known.shared:
                self._settle(len(self.open))
                self.settled.append(known.shared[token])
            elif token not in known.dropped:
                self.open += text.encode()
        if len(self.open) > 4 * KEPT:
            begun = self.open[:-KEPT]
            word = begun.rfind(b" ")  # words begin with their space
            self._settle(word if word > 0 else len(begun.decode(errors="ignore").encode()))

    def _settle(self, end: int) -> None:
        if end > 0:
            self.settled += self.translation.encode(self.open[:end])
            self.open = self.open[end:]


def _read(tokenizer: PreTrainedTokenizerBase, whose: str, size: int) -> dict[int, bytes | str]:
    """Return what a tokenizer's tokens stand for, those that a model of this vocabulary knows."""
    texts = token_texts(tokenizer)
    if texts is None:
        problem = f"{whose}'s tokenizer ({type(tokenizer).__name__}) is neither byte-level nor SentencePiece's"
        raise TokenizerMismatch(f"{problem}, so its tokens cannot be translated: choose a draft with the target's")
    return {token: text for token, text in texts.items() if token < size}


def _by_text(tokenizer: PreTrainedTokenizerBase, texts: Mapping[int, bytes | str]) -> dict[bytes | str, int]:
    """Return token ids by text; of equal texts the first counts, and tokens of single bytes (<0x20>) come last."""
    single = {token for piece, token in tokenizer.get_vocab().items() if BYTE.fullmatch(piece)}
    found: dict[bytes | str, int] = {}
    for token in sorted(texts, key=lambda token: (token in single, token)):
        if texts[token]:
            found.setdefault(texts[token], token)
    return found


def bare_encoder(tokenizer: Any) -> Tokenizer:
    """Return a copy of a tokenizer's backend that adds nothing before a text, cuts nothing off and pads nothing."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    unprefixed = {step: _unprefixed(parts[step]) for step in ("normalizer", "pre_tokenizer")}
    return Tokenizer.from_str(json.dumps({**parts, **unprefixed, "truncation": None, "padding": None}))


def _unprefixed(step: Record | None) -> Record | None:
    """Return a step of a tokenizer, as JSON, that puts no space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    nothing = {"prepend_scheme": "never", "add_prefix_space": False}
    changed = {name: nothing.get(name, value) for name, value in step.items()}
    for name in changed.keys() & {"normalizers", "pretokenizers"}:
        changed[name] = [kept for part in step[name] if (kept := _unprefixed(part))]
    return changed
