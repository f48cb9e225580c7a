"""One token as text, with visible white space.

Knows: tokenizers.  Does not know: trees, pictures.
"""

from typing import Any

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
    if piece.startswith("<0x"):
        return f"\\x{piece[3:5].lower()}"
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these bytes are written as themselves
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[c] for c in piece if c in table).decode("utf-8", "backslashreplace")
