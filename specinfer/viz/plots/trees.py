"""One token tree: as boxes and edges, and as the mask of its one pass.

Knows: the description of a drawn step.  Does not know: matplotlib's fonts, figures and legends (`axes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specinfer.errors import InputError
from specinfer.results import Step
from specinfer.tree import TokenTree, render
from specinfer.tree.drawing import STATES, DrawnNode, TreeDrawing, columns
from specinfer.viz.description import Description, describe
from specinfer.viz.inspection import StepInspection
from specinfer.viz.plots.axes import (
    BLUE,
    FONT,
    GREY,
    MARKERS,
    PALE,
    PLAIN,
    SKY,
    WHITE,
    WIDEST,
    Options,
    axes_of,
    drawable,
    families,
    legend,
    scale_of,
)
from specinfer.viz.style import BY_DRAFT, LIGHT, STYLES, NodeStyle, edge, shapes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTER, ROW = 0.069, 0.24  # inches, of a character and of a line of the tree
GAP = 10  # characters between two levels of a tree: the edge, its probability, the drafts' marks
LONGEST = 14  # characters of a token that are shown


def plot_tree(step: Any, tokenizer: Any = None, ax: Axes | None = None, *, drafts: Sequence[str] = ()) -> Axes:
    """Draw a token tree from left to right, likeliest sibling on top.

    A box is a node.  The draft's probability of it, given its parent, stands above the edge to it: likelier nodes have
    wider edges.  The edge ends in the marks of the drafts that proposed the node.  In a step, ✓ are the accepted nodes,
    ✂ those accepted beyond the text's end, ✗ the rejected ones, and + is the bonus token.

    Args:
        step: a `Step` or a `StepInspection`; or a `TokenTree`, which is not verified yet.
        tokenizer: turns ids into text; without it, and of an inspection without its own, ids are shown.
        ax: where to draw; the text is made smaller where the tree would not fit.
        drafts: their names by id, such as ``[d.draft for d in result.stats.drafts]``; an inspection knows them.

    Raises:
        InputError: not a tree, not a tokenizer, or matplotlib is not installed.
    """
    description = _described(step, tokenizer, "plot_tree")
    drawing = description.best.drawing
    labels = [f"{drawable(node.text, LONGEST)} {node.mark}".rstrip() for node in drawing.nodes]
    *lefts, right = drawing.lefts([columns(label) for label in labels], GAP)
    points = [(lefts[node.depth], line) for node, line in zip(drawing.nodes, drawing.lines, strict=True)]
    right, lines = right - GAP + 2, max(drawing.lines) + 1
    scale = scale_of(ax, right * CHARACTER, lines * ROW)
    new, ax = ax is None, axes_of(ax, max(right * CHARACTER + 0.4, 3.5), lines * ROW + 0.5)
    _draw_edges(ax, drawing.nodes, points, scale)
    for number, (node, point, label) in enumerate(zip(drawing.nodes, points, labels, strict=True)):
        _draw_node(ax, node, point, label, scale, f"node-{number}")
    names = [*drafts, *description.drafts[len(drafts) :]]
    proposers = _draw_proposers(ax, drawing, points, names, scale)
    ax.set(xlim=(-1, right), ylim=(lines - 0.4, -0.6), yticks=[])
    ax.set_xticks(lefts, ["depth 0", *map(str, range(1, len(lefts)))], ha="left", fontsize=FONT, color=GREY)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.spines[:].set_visible(False)
    legend(ax, [*_state_handles(drawing.states), *proposers], below=True, grow=new)
    return ax


def _draw_edges(ax: Axes, nodes: Sequence[DrawnNode], points: Sequence[tuple[float, float]], scale: float) -> None:
    """Draw a line from each parent, under whose box it begins, to its child, and write the probability above it."""
    from matplotlib.collections import LineCollection

    turn = np.linspace(0, 1, 24)
    lines, pens = [], []
    order = sorted(range(1, len(nodes)), key=lambda child: nodes[child].accepted)  # accepted ones above the others
    for child in order:
        node = nodes[child]
        (x0, y0), (x1, y1) = points[node.parent], points[child]
        bend = np.column_stack((x1 - GAP + 1 + 3 * turn, y0 + (y1 - y0) * turn**2 * (3 - 2 * turn)))
        lines.append(np.vstack(([[x0 + 0.6, y0]], bend, [[x1, y1]])))
        width, dashes = edge(node)
        pens.append((LIGHT[style(node).line], 0.8 * width * scale, _line_style(dashes, width)))
        if node.figure:
            font: Options = {"fontsize": (FONT - 2) * scale, "color": GREY, "gid": f"probability-{child}"}
            ax.text(x1 - GAP + 4.2, y1 - 0.08, node.figure, ha="left", va="bottom", **font)
    if lines:
        colours, widths, styles = map(list, zip(*pens, strict=True))
        pen: Options = {"colors": colours, "linewidths": widths, "linestyles": styles, "capstyle": "round"}
        ax.add_collection(LineCollection(lines, zorder=1, gid="edges", **pen), autolim=False)


def _draw_node(ax: Axes, node: DrawnNode, point: tuple[float, float], label: str, scale: float, gid: str) -> None:
    box = _box(style(node), scale) | {"boxstyle": f"round,pad=0.3,rounding_size={1.6 * style(node).corner}"}
    font: Options = {"family": families(), "size": FONT * scale, "color": LIGHT[style(node).ink], **PLAIN}
    ax.text(point[0] + 0.4, point[1], label, gid=gid, bbox=box, ha="left", va="center", zorder=3, **font)


def _draw_proposers(
    ax: Axes, drawing: TreeDrawing, points: Sequence[tuple[float, float]], names: Sequence[str], scale: float
) -> list[Any]:
    """Mark the nodes with the drafts that proposed them; return the legend's handles."""
    from matplotlib.lines import Line2D

    handles = []
    for draft in drawing.drafts:
        pairs = zip(points, drawing.nodes, strict=True)
        at = [(x - 0.9 - 1.3 * node.drafts.index(draft), y) for (x, y), node in pairs if draft in node.drafts]
        colour, marker = BY_DRAFT[draft % len(BY_DRAFT)], MARKERS[shapes(names)[draft]]
        pen: Options = {"marker": marker, "s": 20 * scale**2, "edgecolors": WHITE, "linewidths": 0.4}
        ax.scatter(*zip(*at, strict=True), c=colour, zorder=4, gid=f"draft-{draft}", **pen)
        handles.append(Line2D([], [], color=colour, marker=marker, ls="", label=drawable(names[draft], 24)))
    return handles


def _state_handles(states: Sequence[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(label=" ".join(STATES[state]).strip(), **_box(STYLES[state])) for state in states]


def _box(shape: NodeStyle, scale: float = 1.0) -> Options:
    """Return the colours and the line of a node's box."""
    line = {"ec": LIGHT[shape.line or "ink"], "lw": shape.width * scale, "ls": _line_style(shape.dashes, shape.width)}
    return {"fc": LIGHT[shape.fill], **line}


def _line_style(dashes: tuple[int, ...], width: float) -> Any:
    """Return dashes as matplotlib takes them: in line widths."""
    return (0, tuple(length / width for length in dashes)) if dashes else "-"


def plot_mask(step: Any, tokenizer: Any = None, prefix: int = 0, ax: Axes | None = None) -> Axes:
    """Draw the topology-aware mask of a tree's one pass: which nodes (columns) each node (row) attends to.

    A node sees itself, its ancestors and the committed prefix.  The rows are labelled with the tree as `render` draws
    it: the drafts' probabilities at the right.

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
    names = [drawable(node.text, LONGEST) for node in drawn.drawing.nodes[: len(tree)]]
    rows = render(tree, dict(zip(tree.tokens.tolist(), names, strict=True)).__getitem__).split("\n")
    longest, count, left = max(map(columns, rows)), len(tree), -2.5 if prefix else -0.5
    cell = float(np.clip(2.6 / count, min(0.22, WIDEST / count), 0.45))  # inches
    size = cell * (count - 0.5 - left), cell * count
    scale = scale_of(ax, *size) * min(1.0, cell * 72 * 0.7 / FONT)
    heads = [*(["prefix"] if prefix else []), *names]
    margins = CHARACTER * scale * longest + 0.4, CHARACTER * scale * max(map(columns, heads)) + 0.3
    new, ax = ax is None, axes_of(ax, max(size[0] + margins[0], 3.0), size[1] + margins[1])
    handles = _draw_mask(ax, tree.ancestor_mask(), prefix)
    font: Options = {"family": families(), "size": FONT * scale, **PLAIN}
    ax.set_yticks(range(count), [row + " " * (longest - columns(row)) for row in rows], **font)
    ax.set_xticks([*([-1.6] if prefix else []), *range(count)], heads, rotation=90, **font)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.set(xlim=(left, count - 0.5), ylim=(count - 0.5, -0.5))
    legend(ax, handles, below=True, grow=new)
    return ax


def _draw_mask(ax: Axes, mask: np.ndarray, prefix: int) -> list[Any]:
    """Draw the cells; return the legend's handles."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    nodes = np.arange(len(mask))
    edges = np.arange(len(mask) + 1) - 0.5
    colours = ListedColormap([WHITE, SKY, BLUE])
    cells = mask + np.eye(len(mask))
    ax.pcolormesh(edges, edges, cells, cmap=colours, vmin=0, vmax=2, edgecolors=PALE, linewidth=0.5, gid="mask")
    ax.scatter(nodes, nodes, s=6, c=WHITE, zorder=3, gid="itself")
    handles = [
        Patch(fc=BLUE, label="a row sees itself"),
        Patch(fc=SKY, label="its ancestors"),
        Patch(fc=WHITE, ec=GREY, lw=0.5, label="nothing else"),
    ]
    if not prefix:
        return handles
    prefixed: Options = {"fc": "#D5ECF9", "ec": GREY, "hatch": "///", "lw": 0.5}
    ax.add_patch(Rectangle((-2.5, -0.5), 1.8, len(mask), gid="prefix", **prefixed))
    return [*handles, Patch(label=f"the prefix of {prefix}", **prefixed)]


def _described(thing: Any, tokenizer: Any, function: str) -> Description:
    """Describe a step, an inspection of one, or whatever has a tree."""
    if not isinstance(thing, Step | StepInspection):
        thing = getattr(thing, "tree", thing)
        if not isinstance(thing, TokenTree):
            hint = ": a result has many, draw one of result.steps" if hasattr(thing, "steps") else ""
            raise InputError(f"{function} draws a TokenTree or a Step, not a {type(thing).__name__}{hint}")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InputError(
            f"a {type(tokenizer).__name__} is not a tokenizer: it has no `decode`, which turns ids into text"
        )
    return describe(thing, tokenizer)
