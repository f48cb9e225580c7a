"""A bar over work, where someone watches: in a terminal or a notebook.  And a count of tokens, for all bars.

Knows: standard error, whether a notebook runs.  Does not know: what the work is.
"""

import sys
from collections.abc import Iterator
from typing import Any


class Decoded:
    """What this process has decoded so far."""

    tokens = 0


decoded = Decoded()


def in_notebook() -> bool:
    """Return whether this is a notebook's kernel."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def text_progress(blocks: list[Any], done: int) -> Iterator[Any]:
    """Yield blocks of texts under a bar that counts texts: a `Progress` function.

    Args:
        blocks: what is left.
        done: texts that were done before.
    """
    from tqdm import tqdm

    watched = sys.stderr.isatty() or in_notebook()
    with tqdm(unit="text", initial=done, total=done + sum(map(len, blocks)), disable=not watched) as bar:
        for block in blocks:
            yield block
            bar.update(len(block))
