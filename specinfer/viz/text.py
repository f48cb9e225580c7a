"""A drawn step as text, one node a line, for terminals and logs.

Knows: the description of a thing and its steps, box-drawing characters, what a stream can show.
Does not know: how things are described, commands.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from specinfer.common.token_text import Tokenizer
from specinfer.tree.drawing import BONUS, DrawnNode, columns
from specinfer.viz.description import Description, Drawable, DrawnStep, describe
from specinfer.viz.style import ASCII, TERMINAL, by_draft, terminal

WIDEST = 66  # columns of lines and tokens, beyond which levels stand closer; what is right of them takes a dozen


def text(
    thing: Drawable, stream: TextIO | None = None, tokenizer: Tokenizer | None = None, step: int | None = None
) -> str:
    """Return a tree as lines of text: token, probability given the parent, who drafted it, what became of it.

    Args:
        thing: what has one, or several.
        stream: where it will be written.  In a terminal it has colours, unless ``NO_COLOR`` is set.  Where the encoding
            does not hold the signs, they are spelt in ASCII; None or one without an encoding holds every character.
        tokenizer: from ids to text; by default the one that the thing was made with, if known.
        step: of a result or an inspection, from 0; None: the one to look at first.
    """
    description = describe(thing, tokenizer)
    drawn = description.best if step is None else description.steps[step]
    paint = painted if in_colours(stream) else lambda words, codes: words
    lines = _lines(description, drawn, paint, str)
    try:
        lines.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return _lines(description, drawn, paint, in_ascii)
    return lines


def _lines(
    description: Description, drawn: DrawnStep, paint: Callable[[str, str], str], spell: Callable[[str], str]
) -> str:
    """Return a step's tree, given how text is put into a terminal's colours, and how signs and tokens are spelt."""
    legend = description.legend([drawn]) if drawn.record is not None or len(description.drafts) > 1 else []
    shapes = list(map(spell, description.shapes)) if legend else []
    by_shape = [paint(shape, TERMINAL[by_draft(draft)]) for draft, shape in enumerate(shapes)]
    nodes = [node._replace(text=spell(node.text)) for node in drawn.drawing.nodes]
    for gap in (" ", ""):
        order = [(nodes[number], spell(stem)) for number, stem in stems(nodes, gap)]
        width = max(columns(stem + node.text) for node, stem in order)
        if width <= WIDEST:
            break
    most = max(len(node.drafts) for node in nodes) if legend else 0
    lines = []
    for node, stem in order:
        left = paint(stem, TERMINAL["soft"]) + paint(node.text, terminal(node))
        left += " " * (width - columns(stem + node.text))
        by = [by_shape[draft] for draft in node.drafts if legend]
        figure, mark = paint(f"{node.figure:>4}", TERMINAL["soft"]), paint(spell(node.mark), terminal(node))
        right = " ".join([*by, *[" "] * (most - len(by)), mark])
        lines.append(f"{left}  {figure}  {right}".rstrip())
    signs = dict(zip(shapes, by_shape, strict=True))
    words = [f"{signs.get(spell(sign), spell(sign))} {meaning}" for sign, meaning in legend]
    return "\n".join([*lines, *filter(None, ["   ".join(words)])])


def stems(nodes: Sequence[DrawnNode], gap: str = " ") -> Iterator[tuple[int, str]]:
    """Yield nodes from top to bottom, by number, each with the lines that lead to it; dashed where none was reached.

    The bonus token comes first below its parent.

    Args:
        nodes: of a tree, in its order.
        gap: between a line and its token.
    """
    order = sorted(range(len(nodes)), key=lambda i: (nodes[i].parent, 1) if nodes[i].state == BONUS else (i, 0))
    last = {nodes[i].parent: i for i in order}  # child of each node
    indents = [""] * len(nodes)  # of each node's children
    for i in order:
        parent, line = nodes[i].parent, "┄" if nodes[i].state == "unreached" else "─"
        if parent < 0:
            yield i, ""
            continue
        corner, below = ("└", "  ") if last[parent] == i else ("├", "│ ")
        indents[i] = indents[parent] + below + gap
        yield i, f"{indents[parent]}{corner}{line}{gap}"


def in_colours(stream: object) -> bool:
    """Whether a stream is a terminal that may be written to in colours."""
    return bool(
        getattr(stream, "isatty", bool)() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def in_ascii(text: str) -> str:
    """Return a text with signs spelt in ASCII, and other characters as escapes."""
    return text.translate(ASCII).encode("ascii", "backslashreplace").decode()


def painted(text: str, codes: str) -> str:
    """Return a text between a terminal's codes; nothing around nothing."""
    return f"\x1b[{codes}m{text}\x1b[0m" if text.strip() and codes else text
