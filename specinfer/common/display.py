"""How trees, steps, results and comparisons display themselves: by drawing functions of `specinfer.viz`.

Knows: names of drawing functions.  Does not know: how they draw.  `specinfer.viz` is found by its name when something
is drawn.  So what is drawn never imports what draws it.
"""

from importlib import import_module
from os import PathLike
from typing import Any

from specinfer.common.token_text import Tokenizer


def draw(name: str, *args: object, **options: object) -> Any:
    """Call the drawing function of this name."""
    return getattr(import_module("specinfer.viz"), name)(*args, **options)


class Displayed:
    """Base of trees, steps, results and inspections: display in notebooks, as pages, pictures and JSON."""

    def _repr_html_(self) -> str:
        return str(draw("fragment", self))

    def to_html(self, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
        """Return a page that is complete in itself and needs no network.

        Args:
            path: a file to write it to, as well.
            tokenizer: from ids to text; by default the one it was made with, if known.
        """
        return str(draw("page", self, path, tokenizer))

    def to_svg(self, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
        """Return a picture of the tree, or of the one to look at first.  Arguments: as `to_html`."""
        return str(draw("picture", self, path, tokenizer))

    def to_json(self, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
        """Return the page's data as JSON (`specinfer.viz.description`).  Arguments: as `to_html`."""
        return str(draw("data", self, path, tokenizer))
