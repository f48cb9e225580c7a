"""A token tree as text, one node a line, for terminals and logs.

This module knows box-drawing characters.  It does not know tokenizers: it is handed a function from id to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specinfer.tree.drawing import BONUS, TreeDrawing, columns, visible


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
    states = None
    if path is not None:
        states = ["root", *("accepted" if node in path else "rejected" for node in range(1, len(tree)))]
    name = str if text is None else lambda token: visible(text(token))
    end = path[-1] if path else 0
    nodes = TreeDrawing.of(tree, name, states, None if bonus is None else visible(bonus), end).nodes
    order = sorted(range(len(nodes)), key=lambda i: (end, 1) if nodes[i].state == BONUS else (i, 0))
    last = {nodes[i].parent: i for i in order}  # child of each node
    indents = [""] * len(nodes)  # of each node's children
    rows: list[tuple[str, str]] = []  # what stands left and right
    for i in order:
        node = nodes[i]
        if node.parent < 0:
            rows.append((node.text, ""))
            continue
        branch, below = ("└─ ", "   ") if last[node.parent] == i else ("├─ ", "│  ")
        indents[i] = indents[node.parent] + below
        rows.append((indents[node.parent] + branch + node.text, f"{node.figure:>4}  {node.mark}"))
    width = max(columns(left) for left, _ in rows)
    return "\n".join(f"{left}{' ' * (width - columns(left))}  {right}".rstrip() for left, right in rows)
