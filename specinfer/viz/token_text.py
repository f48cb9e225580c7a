"""One token as text, with visible white space.

Knows: tokenizers.  Does not know: trees, pictures.
"""

from typing import Any

from specinfer.common.token_bytes import BYTE, byte_level, sentence_piece
from specinfer.tree.drawing import visible


def token_text(tokenizer: Any, token: int) -> str:
    """Return one token's text with visible white space.

    Bytes that are no complete character are shown as ``\\xe2``, ids that the tokenizer does not know as ``#264``.

    Args:
        tokenizer: None shows the id.
        token: the id.
    """
    if tokenizer is None:
        return str(token)
    piece, text = tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])
    if piece is None:
        return f"#{token}"
    if "\ufffd" in text:
        text = _bytes_of(piece)
    elif piece.startswith("▁") and not text.startswith(" "):  # decoding drops the first space of a text
        text = f" {text}"
    return visible(text)


def _bytes_of(piece: str) -> str:
    """Return a token that ends inside a character, from how it is written in a byte-level table or as <0xE2>."""
    read = sentence_piece if BYTE.fullmatch(piece) else byte_level
    return read(piece).decode("utf-8", "backslashreplace")
