"""One token tree: as boxes and edges, and as the mask of its one pass.

Knows: the description of a drawn step.  Does not know: matplotlib's fonts, figures and legends (`axes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from specinfer.common.token_text import Tokenizer
from specinfer.errors import InputError
from specinfer.evaluation.inspect.inspection import StepInspection
from specinfer.results import Step
from specinfer.tree import TokenTree
from specinfer.tree.drawing import DrawnNode, columns
from specinfer.viz.description import Description, describe
from specinfer.viz.plots import axes as draw
from specinfer.viz.style import BY_DRAFT, LIGHT, edge, style
from specinfer.viz.text import stems

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

CHARACTER, ROW = 0.069, 0.24  # inches, of a character and of a line of the tree
GAP = 10  # characters between two levels of a tree: the edge, its probability, the drafts' marks
LONGEST = 14  # characters of a token that are shown


def plot_tree(
    step: object, tokenizer: Tokenizer | None = None, ax: Axes | None = None, *, drafts: Sequence[str] = ()
) -> Axes:
    """Draw a token tree from left to right, likeliest sibling on top.

    A box is a node.  The draft's probability of it, given its parent, stands above the edge to it: likelier nodes have
    wider edges.  The edge ends in the marks of the drafts that proposed the node.  In a step, ✓ are the accepted nodes,
    ✂ those accepted beyond the text's end, ✗ the rejected ones, and + is the bonus token.

    Args:
        step: a `Step` or a `StepInspection`; or a `TokenTree`, which is not verified yet.
        tokenizer: turns ids into text; without it, and of an inspection without its own, ids are shown.
        ax: where to draw; the text is made smaller where the tree would not fit.
        drafts: their names by id: ``[d.draft for d in result.stats.drafts]``; an inspection knows them.

    Raises:
        InputError: not a tree, not a tokenizer, or matplotlib is not installed.
    """
    description = _described(step, tokenizer, "plot_tree")
    description = replace(description, drafts=[*drafts, *description.drafts[len(drafts) :]])
    drawn = description.best
    nodes, lines = drawn.drawing.nodes, drawn.drawing.lines
    labels = [f"{draw.drawable(node.text, LONGEST)} {node.mark}".rstrip() for node in nodes]
    *lefts, end = drawn.drawing.lefts([columns(label) for label in labels], GAP)
    size = (end - GAP + 2) * CHARACTER, (max(lines) + 1) * ROW
    scale = draw.scale_of(ax, *size)
    width = max(size[0] + 0.4, 3.5) if ax is None else ax.get_window_extent().width / ax.figure.dpi
    words = [f"{sign} {draw.drawable(words, 24)}" for sign, words in description.legend([drawn])]
    legend_lines = wrap("   ".join(word.replace(" ", "\xa0") for word in words), int(width / CHARACTER))
    ax = draw.axes_of(ax, width, size[1] + 0.5 + draw.LINE * len(legend_lines))
    ax.set_xlabel("\n".join(legend_lines), loc="left", family=draw.families(), size=draw.FONT, **draw.PLAIN)
    points = [(lefts[node.depth], line) for node, line in zip(nodes, lines, strict=True)]
    for number, (node, label) in enumerate(zip(nodes, labels, strict=True)):
        _draw_node(ax, number, node, label, points[number], scale)
        if node.parent >= 0:
            _draw_edge(ax, number, node, points[node.parent], points[number], scale)
        for turn, draft in enumerate(node.drafts):
            pen: draw.Options = {
                "size": draw.FONT * scale,
                "color": BY_DRAFT[draft % len(BY_DRAFT)],
                "gid": f"draft-{draft}",
            }
            x, y = points[number]
            ax.text(x - 0.9 - 1.3 * turn, y, description.shapes[draft], ha="center", va="center", zorder=4, **pen)
    ax.set(xlim=(-1, end - GAP + 2), ylim=(max(lines) + 0.6, -0.6), yticks=[])
    ax.set_xticks(lefts, ["depth 0", *map(str, range(1, len(lefts)))], ha="left", fontsize=draw.FONT, color=draw.GREY)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.spines[:].set_visible(False)
    return ax


def _draw_node(ax: Axes, number: int, node: DrawnNode, label: str, point: tuple[float, float], scale: float) -> None:
    shape = style(node)
    box: draw.Options = {"boxstyle": f"round,pad=0.3,rounding_size={1.6 * shape.corner}", "lw": shape.width * scale}
    box |= {"fc": LIGHT[shape.fill], "ec": LIGHT[shape.line], "ls": _line_style(shape.dashes, shape.width)}
    font: draw.Options = {"family": draw.families(), "size": draw.FONT * scale, "color": LIGHT[shape.ink], **draw.PLAIN}
    ax.text(point[0] + 0.4, point[1], label, gid=f"node-{number}", bbox=box, va="center", zorder=3, **font)


def _draw_edge(
    ax: Axes, number: int, node: DrawnNode, start: tuple[float, float], point: tuple[float, float], scale: float
) -> None:
    """Draw the line from the parent, under whose box it begins, to the node, and write the probability above it."""
    (x0, y0), (x1, y1), turn = start, point, np.linspace(0, 1, 24)
    x = [x0 + 0.6, *(x1 - GAP + 1 + 3 * turn), x1]
    y = [y0, *(y0 + (y1 - y0) * turn**2 * (3 - 2 * turn)), y1]
    width, dashes = edge(node)
    pen: draw.Options = {"color": LIGHT[style(node).line], "lw": 0.8 * width * scale, "ls": _line_style(dashes, width)}
    ax.plot(x, y, dash_capstyle="round", zorder=1.5 if node.accepted else 1, gid=f"edge-{number}", **pen)
    font: draw.Options = {"fontsize": (draw.FONT - 2) * scale, "color": draw.GREY, "gid": f"probability-{number}"}
    if node.figure:
        ax.text(x1 - GAP + 4.2, y1 - 0.08, node.figure, va="bottom", **font)


def _line_style(dashes: tuple[int, ...], width: float) -> object:
    """Return dashes as matplotlib takes them: in line widths."""
    return (0, tuple(length / width for length in dashes)) if dashes else "-"


def plot_mask(step: object, tokenizer: Tokenizer | None = None, prefix: int = 0, ax: Axes | None = None) -> Axes:
    """Draw the topology-aware mask of a tree's one pass: which nodes (columns) each node (row) attends to.

    A node sees itself, its ancestors and the committed prefix.  The rows are labelled with the tree as a terminal
    shows it: the drafts' probabilities at the right.

    Args:
        step: what has a tree, or a `TokenTree`.
        tokenizer: turns ids into text; without it, and of an inspection without its own, ids are shown.
        prefix: committed tokens in the cache, drawn as one wide column; 0 leaves it out.
        ax: where to draw.

    Raises:
        InputError: not a tree, not a tokenizer, a negative prefix, or matplotlib is not installed.
    """
    if prefix < 0:
        raise InputError(f"prefix is {prefix}: give the number of committed tokens in the cache, or 0 to leave it out")
    drawn = _described(step, tokenizer, "plot_mask").best
    tree = drawn.tree
    nodes = [node._replace(text=draw.drawable(node.text, LONGEST)) for node in drawn.drawing.nodes[: len(tree)]]
    names, rows = [node.text for node in nodes], _rows(nodes)
    longest, count, left = max(map(columns, rows)), len(tree), -2.5 if prefix else -0.5
    cell = float(np.clip(2.6 / count, min(0.22, draw.WIDEST / count), 0.45))  # inches
    size = cell * (count - 0.5 - left), cell * count
    scale = draw.scale_of(ax, *size) * min(1.0, cell * 72 * 0.7 / draw.FONT)
    heads = [*(["prefix"] if prefix else []), *names]
    margins = CHARACTER * scale * longest + 0.4, CHARACTER * scale * max(map(columns, heads)) + 0.3
    new, ax = ax is None, draw.axes_of(ax, max(size[0] + margins[0], 3.0), size[1] + margins[1])
    handles = _draw_mask(ax, tree.ancestor_mask(), prefix)
    font: draw.Options = {"family": draw.families(), "size": draw.FONT * scale, **draw.PLAIN}
    ax.set_yticks(range(count), [row + " " * (longest - columns(row)) for row in rows], **font)
    ax.set_xticks([*([-1.6] if prefix else []), *range(count)], heads, rotation=90, **font)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.set(xlim=(left, count - 0.5), ylim=(count - 0.5, -0.5))
    draw.legend(ax, handles, below=True, grow=new)
    return ax


def _rows(nodes: Sequence[DrawnNode]) -> list[str]:
    """Return nodes as lines of text, with their probabilities."""
    names = [stem + nodes[number].text for number, stem in stems(nodes)]
    width = max(map(columns, names))
    pairs = zip(names, nodes, strict=True)
    return [f"{name}{' ' * (width - columns(name))}  {node.figure:>4}".rstrip() for name, node in pairs]


def _draw_mask(ax: Axes, mask: np.ndarray, prefix: int) -> list[Patch]:
    """Draw the cells; return the draw.legend's handles."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    nodes = np.arange(len(mask))
    edges = np.arange(len(mask) + 1) - 0.5
    cells = mask + np.eye(len(mask))
    grid: draw.Options = {
        "cmap": ListedColormap(["white", draw.SKY, draw.BLUE]),
        "edgecolors": draw.PALE,
        "linewidth": 0.5,
    }
    ax.pcolormesh(edges, edges, cells, vmin=0, vmax=2, gid="mask", **grid)
    ax.scatter(nodes, nodes, s=6, c="white", zorder=3, gid="itself")
    handles = [
        Patch(fc=draw.BLUE, label="a row sees itself"),
        Patch(fc=draw.SKY, label="its ancestors"),
        Patch(fc="white", ec=draw.GREY, lw=0.5, label="nothing else"),
    ]
    if not prefix:
        return handles
    prefixed: draw.Options = {"fc": draw.PALE, "ec": draw.GREY, "hatch": "///", "lw": 0.5}
    ax.add_patch(Rectangle((-2.5, -0.5), 1.8, len(mask), gid="prefix", **prefixed))
    return [*handles, Patch(label=f"the prefix of {prefix}", **prefixed)]


def _described(thing: object, tokenizer: Tokenizer | None, function: str) -> Description:
    """Describe a step, an inspection of one, or whatever has a tree."""
    if not isinstance(thing, Step | StepInspection):
        thing = getattr(thing, "tree", thing)
        if not isinstance(thing, TokenTree):
            hint = ": a result has many, draw one of result.steps" if hasattr(thing, "steps") else ""
            raise InputError(f"{function} draws a TokenTree or a Step, not a {type(thing).__name__}{hint}")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InputError(f"a {type(tokenizer).__name__} is not a tokenizer: it has no `decode` from ids to text")
    return describe(thing, tokenizer)
