"""How trees, steps, results and comparisons show themselves: by whatever draws, which is registered here.

Knows: names of drawing functions.  Does not know: what draws.  `specinfer` registers `specinfer.viz`, which is imported
when something is drawn first; so what is shown never imports what shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

_finders: list[Callable[[str], Callable[..., Any]]] = []


def register(finder: Callable[[str], Callable[..., Any]]) -> None:
    """Let a function find what draws, by name; the newest one is asked."""
    _finders.append(finder)


def draw(name: str, *args: Any, **options: Any) -> Any:
    """Return what the drawing function of this name makes."""
    return _finders[-1](name)(*args, **options)


class Displayed:
    """Base of trees, steps, results and inspections: they show themselves in notebooks, as pages, pictures, JSON."""

    def _repr_html_(self) -> str:
        return str(draw("fragment", self))

    def to_html(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return a page that needs nothing but itself, no network either.

        Args:
            path: a file to write it to, too.
            tokenizer: from ids to text; by default what the thing was made with, if it knows.
        """
        return str(draw("page", self, path, tokenizer))

    def to_svg(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return a picture of the tree, or of the tree that gained most.  Arguments are those of `to_html`."""
        return str(draw("picture", self, path, tokenizer))

    def to_json(self, path: str | PathLike[str] | None = None, tokenizer: Any = None) -> str:
        """Return what the page shows, as JSON (`specinfer.viz.model`).  Arguments are those of `to_html`."""
        return str(draw("data", self, path, tokenizer))
