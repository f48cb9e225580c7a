"""Stop strings: whether one of them ends in the last token of a text, and the text before it.

Knows: how tokenizers write tokens.  Does not know: runs, models, why else a text may end.

The rule is that of ``StopStringCriteria`` in transformers: each token, special ones included, has a text that depends
on no later token; an id beyond the tokenizer's table has none, and no string reaches across it; a string counts if it
ends anywhere in the last token.  Texts are compared as bytes, because a character may consist of several tokens.  Only
tokens that a string can reach back to are read, and nothing is computed for the rest of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from specinfer.common.token_bytes import BYTE, byte_level, sentence_piece


class StopStrings:
    """Strings that end a text.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        strings: not empty, none of them empty.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, [string.encode() for string in strings]
        self.reach = max(map(len, self.strings)) - 1  # bytes before the last token that matter
        self.known: dict[tuple[int, int], bytes | None] = {}  # bytes of a token after another
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self.options: dict[str, bool] = {"clean_up_tokenization_spaces": False} if cleans else {}

    def find(self, ids: Sequence[int]) -> int | None:
        """Return how many bytes before the end the first stop string begins; None if none ends in the last token.

        Args:
            ids: of prompt and text, at least one.
        """
        start = len(ids) - 1
        text = last = self._bytes(ids, start) or b""
        while last and start and len(text) - len(last) < self.reach:
            start -= 1
            if (earlier := self._bytes(ids, start)) is None:
                break
            text = earlier + text
        before = len(text) - len(last)
        found = [text.find(string, max(0, before - len(string) + 1)) for string in self.strings]
        return max((len(text) - begin for begin in found if begin >= 0), default=None)

    def text_before(self, ids: Sequence[int], first: int) -> str:
        """Return the text up to the stop string that ends it, or all of it if none does; special tokens left out.

        Args:
            ids: of prompt and text.
            first: index of the first id that belongs to the text; the stop string may begin before it.
        """
        left, part, begin = self.find(ids) or 0, b"", len(ids)
        while left > 0:  # until the token in which it begins
            begin -= 1
            part = self._bytes(ids, begin) or b""
            left -= len(part)
        if begin < first:
            return ""
        kept, more = (self.tokenizer.decode(ids[first:end], skip_special_tokens=True) for end in (begin, begin + 1))
        text: str = more[: max(len(kept), len(more) - len(part[-left:].decode(errors="replace")))]
        return text

    def _bytes(self, ids: Sequence[int], index: int) -> bytes | None:
        """Return the bytes of a token after the one before it; None of an id beyond the tokenizer's table."""
        key = ids[max(index - 1, 0)], ids[index]
        if key not in self.known:
            self.known[key] = self._read(*key)
        return self.known[key]

    def _read(self, before: int, token: int) -> bytes | None:
        piece: str | None = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return None
        alone = self._decode(token)
        if BYTE.fullmatch(piece) and alone != piece:
            return sentence_piece(piece)
        if "\ufffd" in alone:  # it begins or ends inside a character
            return byte_level(piece)
        if self.tokenizer.convert_ids_to_tokens(before) is None:
            before = token  # a first token would lose its space
        return self._decode(before, token)[len(self._decode(before)) :].encode()

    def _decode(self, *ids: int) -> str:
        text: str = self.tokenizer.decode(list(ids), **self.options)
        return text
