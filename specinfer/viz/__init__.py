"""Trees, steps, results and inspections as pages, pictures and JSON that need no network.

    description.py  what there is to show, as data, for all painters
    style.py        colours, shapes and lines, for all painters

    html.py         the interactive page: what is in page/, with the data inside
    svg.py          the still picture of one tree
    side_by_side.py two results on one text: as data, and their still picture
    text.py         one tree for terminals and logs
    live.py         a generation in a notebook, as it happens
    plots/          pictures on matplotlib

Nothing below imports it: things show themselves through `specinfer.common.display`.
"""

from html import escape
from os import PathLike
from typing import TypeAlias

from specinfer.common.files import write_whole
from specinfer.common.token_text import Tokenizer
from specinfer.results import Result
from specinfer.viz.description import Description, Drawable, describe
from specinfer.viz.html import fragment_of, page_of, to_json
from specinfer.viz.plots import plot_compare, plot_drafts
from specinfer.viz.side_by_side import PairDescription, SideBySide, describe_pair, lanes_of
from specinfer.viz.svg import svg_of
from specinfer.viz.text import text

__all__ = ["SideBySide", "data", "fragment", "page", "picture", "plot_compare", "plot_drafts", "text"]

Displayable: TypeAlias = Drawable | SideBySide


def fragment(thing: Displayable) -> str:
    """Return an element for a notebook: of a result that has no step yet, its text."""
    if isinstance(thing, Result) and not thing.steps:
        return f"<pre>{escape(thing.text)}</pre>"
    return fragment_of(*_painted(thing))


def page(thing: Displayable, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """Return a complete document; write it if there is a path.

    Raises:
        InputError: it cannot be written there.
    """
    return _written(page_of(*_painted(thing, tokenizer)), path)


def picture(thing: Displayable, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """Return a picture; arguments and errors as `page`."""
    return _written(_painted(thing, tokenizer)[1], path)


def data(thing: Displayable, path: str | PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """Return what the page draws, as JSON; arguments and errors as `page`."""
    return _written(to_json(_described(thing, tokenizer).to_dict()), path)


def _described(thing: Displayable, tokenizer: Tokenizer | None) -> Description | PairDescription:
    return describe_pair(thing, tokenizer) if isinstance(thing, SideBySide) else describe(thing, tokenizer)


def _painted(thing: Displayable, tokenizer: Tokenizer | None = None) -> tuple[Description | PairDescription, str]:
    """Return the description of a thing, and its still picture."""
    found = _described(thing, tokenizer)
    return found, lanes_of(found) if isinstance(found, PairDescription) else svg_of(found)


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        write_whole(path, text)
    return text
