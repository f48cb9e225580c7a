"""How trees, steps, results and comparisons display themselves: by drawing functions that are registered here.

Knows: names of drawing functions.  Does not know: how they draw.  `specinfer` registers `specinfer.viz`, which is
imported when something is drawn for the first time.  So what is drawn never imports what draws it.
"""

from collections.abc import Callable
from os import PathLike
from typing import Any

from specinfer.common.token_text import Tokenizer

_finders: list[Callable[[str], Callable[..., object]]] = []


def register(finder: Callable[[str], Callable[..., object]]) -> None:
    """Register a function that finds drawing functions by name; the newest one is used."""
    _finders.append(finder)


def draw(name: str, *args: object, **options: object) -> Any:
    """Call the drawing function of this name."""
    return _finders[-1](name)(*args, **options)


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
