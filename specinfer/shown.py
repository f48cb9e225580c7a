"""How things show themselves: a token as text; a tree or a result in a notebook, as a page, as a picture, as JSON.

This module knows tokenizers, and that `specinfer.display` draws.  It imports nothing until asked, so everything may
import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike


def token_text(tokenizer: Any, token: int) -> str:
    """Return one token's text with visible white space.

    Bytes that are no whole character are shown as ``\\xe2``, ids that the tokenizer does not know as ``#264``.

    Args:
        tokenizer: None shows the id.
        token: the id.
    """
    from specinfer.tree.render import visible

    if tokenizer is None:
        return str(token)
    piece, text = tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])
    if piece is None:
        return f"#{token}"
    if "\ufffd" in text:
        text = _spelt(piece)
    elif piece.startswith("▁") and not text.startswith(" "):  # decoding drops the first space of a text
        text = f" {text}"
    return visible(text)


def _spelt(piece: str) -> str:
    """Return a token that ends inside a character, from how it is written in a byte-level table or as <0xE2>."""
    if piece.startswith("<0x"):
        return f"\\x{piece[3:5].lower()}"
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these bytes are written as themselves
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[c] for c in piece if c in table).decode("utf-8", "backslashreplace")


class Shown:
    """Base of trees, steps, results and inspections."""

    def _repr_html_(self) -> str:
        from specinfer.display import fragment, model

        return fragment(model(self))

    def to_html(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return a page that needs nothing but itself, no network either.

        Args:
            path: a file to write it to, too.
            tokenizer: from ids to text; by default what the thing was made with, if it knows.
        """
        from specinfer.display import model, page, written

        return written(page(model(self, tokenizer)), path)

    def to_svg(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return a picture of the tree, or of the tree that gained most.  Arguments are those of `to_html`."""
        from specinfer.display import svg, written

        return written(svg(self, tokenizer), path)

    def to_json(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return what the page shows, as JSON (`specinfer.display.model`).  Arguments are those of `to_html`."""
        from specinfer.display import json_of, model, written

        return written(json_of(model(self, tokenizer)), path)
