"""Tokens as text: one alone, several whose bytes join into characters, and those that a saved result shows.

Knows: tokenizers, UTF-8.  Does not know: trees, pictures, results.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specinfer.common.token_bytes import BYTE, SPACE, byte_level, sentence_piece

VISIBLE = {" ": "␠", "\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Return the text with white space shown as ␠ ⏎ ⇥ and whatever cannot be printed as an escape."""
    signs = (VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
    return "".join(signs) or "∅"


class Tokenizer(Protocol):
    """Shows tokens: a tokenizer of ``transformers``, or the part of one that a saved result knows."""

    def convert_ids_to_tokens(self, token: int, /) -> Any:
        """Return how a token is written in the table; None if it is not there."""

    def decode(self, ids: list[int], /) -> Any:
        """Return the text of tokens."""


@dataclass(frozen=True)
class KnownTokens:
    """Shows the tokens that it was made with, as their tokenizer would: files and pickles hold it in its place.

    Attributes:
        tokens: by id, how it is written in the tokenizer's table (None if it is not there), and its text alone.
        runs: token ids, and their text together.
    """

    tokens: dict[int, tuple[str | None, str]]
    runs: list[tuple[list[int], str]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Iterable[int], runs: Iterable[list[int]]) -> "KnownTokens":
        """Ask a tokenizer for some ids, and for texts of several."""
        found = {token: (tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])) for token in sorted({*ids})}
        return cls(found, [(run, tokenizer.decode(run)) for run in runs])

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return how a token is written, or None if it is not known."""
        return self.tokens.get(int(token), (None, ""))[0]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text of tokens: as asked for together, else one by one."""
        ids = list(map(int, ids))
        together = next((text for run, text in self.runs if run == ids), "")
        return together or "".join(self.tokens.get(token, (None, ""))[1] for token in ids)


class Piece(NamedTuple):
    """A token's share of a text, where characters may begin in one token and end in another."""

    text: str  # the characters that end in it
    rest: bytes  # its bytes that end none
    open: bytes = b""  # that the next token may complete

    def __str__(self) -> str:
        return visible(self.text + self.rest.decode("ascii", "backslashreplace"))


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return one token's text with visible white space: see `plain_text`."""
    return visible(plain_text(tokenizer, token))


def plain_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return one token's text.

    Bytes that are no complete character are written as ``\\xe2``, ids that the tokenizer does not know as ``#264``.

    Args:
        tokenizer: None gives the id.
        token: the id.
    """
    if tokenizer is None:
        return str(token)
    piece, text = tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])
    if piece is None:
        return f"#{token}"
    if (found := split_bytes(tokenizer, token)) is not None:
        return found.decode("utf-8", "backslashreplace")
    if (piece.startswith((SPACE, " ")) or BYTE.fullmatch(piece)) and text != piece:
        return sentence_piece(piece).decode()  # decoding drops the first space of a text
    return str(text)


def split_bytes(tokenizer: Tokenizer | None, token: int) -> bytes | None:
    """Return the bytes of a token that begins or ends inside a character; None of all others.

    They are known from how the token is written in a byte-level table, or as <0xE2>.
    """
    piece = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    if tokenizer is None or piece is None or "\ufffd" not in tokenizer.decode([token]):
        return None
    return (sentence_piece if BYTE.fullmatch(piece) else byte_level)(piece)


def piece_after(before: bytes, found: bytes | None) -> Piece | None:
    """Return a token's share of a text; None if no character is split in it.

    Args:
        before: the bytes that were left open: see `Piece.open`.
        found: the token's: see `split_bytes`.
    """
    if found is None:
        return None
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    decoded = decoder.decode(before + found)
    left = decoder.getstate()[0]
    text = "".join(c for c in decoded if not "\udc80" <= c <= "\udcff")
    return Piece(text, left[-len(found) :] if text else found, left)


def last_piece(pieces: Iterable[bytes | None]) -> Piece | None:
    """Return the share of the last of several tokens, given the bytes of each: see `split_bytes`."""
    piece: Piece | None = None
    for found in pieces:
        piece = piece_after(piece.open if piece else b"", found)
    return piece
