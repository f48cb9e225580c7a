"""Trees, steps, results and inspections as pages, pictures and JSON that need no network.

    model.py    what there is to show, as plain data
    page.py     the interactive page: page.html, page.css and page.js with the data inside
    svg.py      the still picture of one tree

Things show themselves through `specinfer.shown.Shown`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.files import write_whole

from .model import json_of, model
from .page import fragment, page
from .svg import svg

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["fragment", "json_of", "model", "page", "svg", "written"]


def written(text: str, path: "str | PathLike[str] | None") -> str:
    """Return the text, after writing it to a file if there is a path.

    Raises:
        InputError: it cannot be written there.
    """
    if path is not None:
        write_whole(Path(path), text)
    return text
