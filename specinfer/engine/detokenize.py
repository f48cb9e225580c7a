"""From token ids to text, piece by piece.  A piece is final, and decoding it costs no more than its new tokens.

Knows: how tokenizers join tokens.  Does not know: runs, models.

The text of a token depends on the tokens before it: a first token loses its space, and a character may consist of
several tokens.  So the tokens of the previous piece are decoded again, as context, and only the text after them is new
(prefix and read offsets, as in the detokenizers of vLLM and Text Generation Inference).
"""

import re
from collections.abc import Sequence
from typing import Any

from specinfer.common.token_bytes import BYTE

BARRIER = re.compile(r"[^ ]{4}")  # no clean-up reaches across: it joins at most four characters, the first a space
UNTIDY = "a . b , c ? d ! it 's"


class Pieces:
    """The text of a growing list of token ids.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        start: index of the first id that belongs to the text.
        special: whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Any, start: int = 0, special: bool = False) -> None:
        self.tokenizer, self.first = tokenizer, start
        self.start = self.read = start  # ids[start:read] are the context, ids[read:] are new
        self.context = ""  # its text
        self.seen = start  # ids before it were looked at
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.skipped = set() if special else {number for number, token in added.items() if token.special}
        self.options: dict[str, bool] = {"skip_special_tokens": not special}
        self.cleans: bool | None = False  # whether the tokenizer cleans spaces up; None: not known yet
        self.held = ""  # text that is not cleaned up yet, because the next tokens may join it
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self.options["clean_up_tokenization_spaces"] = False
            self.cleans = self._is_cleaning(tokenizer(UNTIDY, add_special_tokens=False)["input_ids"])

    def more(self, ids: Sequence[int]) -> str:
        """Return new text that no later token can change; it may be empty.

        Args:
            ids: all ids so far: those of the last call, and more.
        """
        unseen, self.seen = ids[self.seen :], len(ids)
        last = next((piece for piece in map(self._piece, reversed(unseen)) if piece is not None), None)
        if last is None or BYTE.fullmatch(last):  # a run of tokens that are one byte each is decoded together
            return ""
        text = self.tokenizer.decode(ids[self.start :], **self.options)
        new: str = text[len(self.context) :]
        if text.endswith("\ufffd") or not new:  # in the middle of a character, or nothing but special tokens
            return ""
        self.start, self.read = self.read, len(ids)
        self.context = self.tokenizer.decode(ids[self.start :], **self.options)
        return new if self.cleans is False else self._cleaned(new, ids)

    def _piece(self, token: int) -> str | None:
        """Return how a token is written; None if texts leave it out: it is special, or an id beyond the table."""
        piece: str | None = None if token in self.skipped else self.tokenizer.convert_ids_to_tokens(token)
        return piece

    def _cleaned(self, new: str, ids: Sequence[int]) -> str:
        """Return text as the tokenizer cleans it up, up to the last barrier."""
        self.held += new
        end = max((found.end() for found in BARRIER.finditer(self.held)), default=0)
        raw, self.held = self.held[:end], self.held[end:]
        cleaned: str = self.tokenizer.clean_up_tokenization(raw)
        if self.cleans is None and cleaned != raw:
            self.cleans = self._is_cleaning(ids[self.first :])
        return cleaned if self.cleans else raw

    def _is_cleaning(self, ids: Sequence[int]) -> bool | None:
        """Return whether the tokenizer cleans up as it says (byte pairs do not); None if these ids do not show it."""
        raw = self.tokenizer.decode(ids, **self.options)
        if self.tokenizer.clean_up_tokenization(raw) == raw:
            return None
        return bool(self.tokenizer.decode(ids, skip_special_tokens=self.options["skip_special_tokens"]) != raw)
