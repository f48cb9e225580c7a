"""Drawing a token tree as text, one node a line, for terminals and logs.

This module knows box-drawing characters.  It does not know tokenizers: it is handed a function from id to
text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unicodedata import east_asian_width

VISIBLE = {" ": "␠", "\n": "⏎", "\t": "⇥"}
ACCEPTED, REJECTED, BONUS = "✓", "✗", "+"


def render(
    tree: Any,
    text: Callable[[int], str] | None = None,
    path: Sequence[int] | None = None,
    bonus: str | None = None,
) -> str:
    """Return the tree as text: token, draft probability given the parent and, once verified, the verdict.

    Args:
        tree: a `TokenTree`, which imports this module.
        text: from token id to text; white space is made visible.  Without it, ids are shown.
        path: the accepted nodes, root excluded, which are marked ✓ and the others ✗; None = not verified yet.
        bonus: the text of the target's own token, drawn with + below the last accepted node.
    """
    end = (path[-1] if path else 0) if bonus is not None else None  # the node that the bonus token follows
    rows: list[tuple[str, str]] = []  # what stands left and right
    indent = [""] * len(tree)  # of each node's children
    for node, token in enumerate(tree.tokens.tolist()):
        name = str(token) if text is None else visible(text(token))
        if node == 0:
            rows.append((name, ""))
        else:
            parent = int(tree.parents[node])
            last = node == tree.children(parent)[-1]
            mark = "" if path is None else ACCEPTED if node in path else REJECTED
            branch = indent[parent] + ("└─ " if last else "├─ ")
            rows.append((branch + name, f"{percent(tree.probability(node)):>4}  {mark}"))
            indent[node] = indent[parent] + ("   " if last else "│  ")
        if node == end and bonus is not None:
            branch = "├─ " if tree.children(node) else "└─ "
            rows.append((indent[node] + branch + visible(bonus), f"{'':4}  {BONUS}"))
    width = max(columns(left) for left, _ in rows)
    return "\n".join(f"{left}{' ' * (width - columns(left))}  {right}".rstrip() for left, right in rows)


def visible(text: str) -> str:
    """Return the text with white space shown as ␠ ⏎ ⇥ and whatever cannot be printed as an escape."""
    shown = (VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
    return "".join(shown) or "∅"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese characters and emoji take two."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


def percent(probability: float) -> str:
    """Return a probability in at most four characters, such as 62%; <1% where it would round to 0 and is not."""
    return "<1%" if 0 < probability < 0.005 else f"{probability:.0%}"
