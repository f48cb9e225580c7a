"""One token tree: as boxes and edges, and as the mask of its one pass.

Knows: trees, and what became of their nodes.  Does not know: matplotlib's fonts, figures and legends (`axes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from specinfer.errors import InputError
from specinfer.results import Step
from specinfer.tree import TokenTree, render, tidy
from specinfer.tree.text import ACCEPTED, BONUS, REJECTED, columns, percent
from specinfer.viz.plots.axes import (
    BLACK,
    BLUE,
    DRAFTS,
    FONT,
    GREEN,
    GREY,
    LINE,
    PALE,
    PLAIN,
    RED,
    SKY,
    WHITE,
    WIDEST,
    Look,
    axes_of,
    drawable,
    families,
    legend,
    scale_of,
    shown,
)
from specinfer.viz.token_text import token_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTER, ROW = 0.069, 0.24  # inches, of a character and of a line of the tree
GAP = 10  # characters between two levels of a tree: the edge, its probability, the drafts' marks

# What a node of a tree is: edge colour, line width, line style, fill, box style, mark.
NODES = {
    "root": (BLACK, 1.0, "-", PALE, "square", ""),
    "drafted": (BLUE, 1.0, "-", WHITE, "round", ""),
    "accepted": (GREEN, 2.0, "-", "#DDF3EC", "round", ACCEPTED),
    "cut": (GREEN, 1.0, "-.", WHITE, "round", "✂"),
    "rejected": (GREY, 1.0, "--", WHITE, "round", REJECTED),
    "unreached": ("#A0A0A0", 0.8, ":", WHITE, "round", ""),
    "bonus": (RED, 1.4, ":", "#FCE8DC", "roundtooth", BONUS),
}


def plot_tree(step: Any, tokenizer: Any = None, ax: Axes | None = None, *, drafts: Sequence[str] = ()) -> Axes:
    """Draw a token tree from left to right, likeliest sibling on top.

    A box is a node.  The edge to it is as wide as the draft's probability of it given its parent, which stands above,
    and ends in the marks of the drafts that proposed it.  Of a step, ✓ are the accepted nodes, ✂ those accepted beyond
    the text's end, ✗ the rejected ones, and + is the bonus token, the target's own.

    Args:
        step: a `Step` or a `StepInspection`; or a `TokenTree`, which is not verified yet.
        tokenizer: turns ids into text; without it, and of an inspection without its own, ids are shown.
        ax: where to draw; the text is made smaller where the tree would not fit.
        drafts: their names by id, such as ``[d.draft for d in result.stats.drafts]``; an inspection knows them.

    Raises:
        InputError: no tree, no tokenizer, or no matplotlib.
    """
    tree = _tree_of(step, "plot_tree")
    bonus = getattr(step, "bonus", None)
    end = None if bonus is None else (0, *step.path)[-1]
    roles = _roles(step) + ([] if bonus is None else ["bonus"])
    tokens = [*tree.tokens.tolist(), *([] if bonus is None else [bonus])]
    names = _labels(tokens, tokenizer or getattr(step, "tokenizer", None))
    labels = [f"{name} {NODES[role][-1]}".rstrip() for name, role in zip(names, roles, strict=True)]
    rows, levels = tidy(tree.parents, end)
    lefts = _columns(labels, levels.astype(int).tolist())
    places = [(lefts[int(level)], float(row)) for level, row in zip(levels, rows, strict=True)]
    size = lefts[-1] * CHARACTER, (rows.max() + 1) * ROW
    scale = scale_of(ax, *size)
    new, ax = ax is None, axes_of(ax, max(size[0] + 0.4, 3.5), size[1] + 0.5)
    _draw_edges(ax, tree, places, roles, scale, end)
    for node, (place, label, role) in enumerate(zip(places, labels, roles, strict=True)):
        _draw_node(ax, place, label, role, scale, f"node-{node}")
    present = _draw_proposers(ax, tree, places, scale)
    _mark_depths(ax, lefts, rows.max() + 1)
    by = _draft_handles(present, drafts or getattr(step, "draft_names", ()))
    _legend_below(ax, [*_role_handles(roles), *by], new)
    return ax


def _roles(step: Any) -> list[str]:
    """Return what each node of the tree is, a key of `NODES`."""
    if isinstance(step, TokenTree):
        return ["root"] + ["drafted"] * step.num_drafted
    return [str(state) for state in (step.states if isinstance(step, Step) else (node.state for node in step.nodes))]


def _columns(labels: Sequence[str], levels: Sequence[int]) -> list[float]:
    """Return, in characters, where the labels of each level begin, and where the last level's end."""
    widest = [0] * (max(levels) + 1)
    for label, level in zip(labels, levels, strict=True):
        widest[level] = max(widest[level], columns(label))
    *lefts, end = accumulate((width + GAP for width in widest), initial=0)
    return [*lefts, end - GAP + 2]


def _draw_edges(
    ax: Axes,
    tree: TokenTree,
    places: Sequence[tuple[float, float]],
    roles: Sequence[str],
    scale: float,
    end: int | None,
) -> None:
    """Draw a line from each parent, under whose box it begins, to its child, and write the probability above it."""
    from matplotlib.collections import LineCollection

    turn = np.linspace(0, 1, 24)
    edges = enumerate([*tree.parents.tolist()[1:], *([] if end is None else [end])], start=1)
    lines, looks = [], []
    for child, parent in sorted(edges, key=lambda edge: roles[edge[0]] == "accepted"):  # these above the others
        (x0, y0), (x1, y1) = places[parent], places[child]
        bend = np.column_stack((x1 - GAP + 1 + 3 * turn, y0 + (y1 - y0) * turn**2 * (3 - 2 * turn)))
        lines.append(np.vstack(([[x0 + 0.6, y0]], bend, [[x1, y1]])))
        colour, width, style, *_ = NODES[roles[child]]
        if child < len(tree):
            probability = tree.probability(child)
            width = 0.6 + 2.6 * probability
            font: Look = {"fontsize": (FONT - 2) * scale, "color": GREY, "gid": f"probability-{child}"}
            ax.text(x1 - GAP + 4.2, y1 - 0.08, percent(probability), ha="left", va="bottom", **font)
        looks.append((colour, width * scale, style))
    if lines:
        colours, widths, styles = map(list, zip(*looks, strict=True))
        look: Look = {"colors": colours, "linewidths": widths, "linestyles": styles}
        ax.add_collection(LineCollection(lines, zorder=1, gid="edges", **look), autolim=False)


def _draw_node(ax: Axes, place: tuple[float, float], label: str, role: str, scale: float, gid: str) -> None:
    colour, width, style, fill, shape, _ = NODES[role]
    box: Look = {"boxstyle": f"{shape},pad=0.3", "ec": colour, "fc": fill, "lw": width * scale, "ls": style}
    ink = GREY if role in ("rejected", "unreached") else BLACK
    font: Look = {"family": families(), "size": FONT * scale, "color": ink, **PLAIN}
    ax.text(place[0] + 0.4, place[1], label, gid=gid, bbox=box, ha="left", va="center", zorder=3, **font)


def _draw_proposers(ax: Axes, tree: TokenTree, places: Sequence[tuple[float, float]], scale: float) -> list[int]:
    """Mark the nodes with the drafts that proposed them; return the drafts that proposed any."""
    proposers = tree.proposers
    present = [draft for draft in range(max(proposers).bit_length()) if any(mask >> draft & 1 for mask in proposers)]
    for draft in present:
        nodes = [node for node, mask in enumerate(proposers) if mask >> draft & 1]
        nearer = [(proposers[node] & ((1 << draft) - 1)).bit_count() for node in nodes]  # marks before this one
        x = [places[node][0] - 0.9 - 1.3 * count for node, count in zip(nodes, nearer, strict=True)]
        colour, mark, *_ = DRAFTS[draft % len(DRAFTS)]
        look: Look = {"c": colour, "marker": mark, "s": 20 * scale**2, "edgecolors": WHITE, "linewidths": 0.4}
        ax.scatter(x, [places[node][1] for node in nodes], zorder=4, gid=f"draft-{draft}", **look)
    return present


def _mark_depths(ax: Axes, lefts: Sequence[float], lines: float) -> None:
    """Number the levels along the top, and leave nothing else of the axes."""
    ax.set(xlim=(-1, lefts[-1]), ylim=(lines - 0.4, -0.6), yticks=[])
    levels = ["depth 0", *map(str, range(1, len(lefts) - 1))]
    ax.set_xticks(lefts[:-1], levels, ha="left", fontsize=FONT, color=GREY)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.spines[:].set_visible(False)


def _legend_below(ax: Axes, handles: Sequence[Any], new: bool) -> None:
    """Put a legend below `ax`; a new figure grows by as much."""
    lines = legend(ax, handles, below=True)
    figure: Any = ax.figure
    if new:
        figure.set_figheight(figure.get_figheight() + LINE * lines)


def _role_handles(roles: Sequence[str]) -> list[Any]:
    from matplotlib.patches import Patch

    looks = [(role, NODES[role]) for role in NODES if role in roles]
    return [
        Patch(ec=colour, fc=fill, lw=width, ls=style, label=f"{mark} {role}".strip())
        for role, (colour, width, style, fill, _, mark) in looks
    ]


def _draft_handles(present: Sequence[int], names: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for draft in present:
        colour, mark, *_ = DRAFTS[draft % len(DRAFTS)]
        name = drawable(names[draft], 24) if draft < len(names) else f"draft {draft}"
        handles.append(Line2D([], [], color=colour, marker=mark, ls="", label=name))
    return handles


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
        InputError: no tree, no tokenizer, a negative prefix, or no matplotlib.
    """
    tree = _tree_of(step, "plot_mask")
    if prefix < 0:
        raise InputError(f"prefix is {prefix}: give the number of committed tokens in the cache, or 0 to leave it out")
    tokens = tree.tokens.tolist()
    names = _labels(tokens, tokenizer or getattr(step, "tokenizer", None))
    rows = render(tree, dict(zip(tokens, names, strict=True)).__getitem__).split("\n")
    longest, count, left = max(map(columns, rows)), len(tree), -2.5 if prefix else -0.5
    cell = float(np.clip(2.6 / count, min(0.22, WIDEST / count), 0.45))  # inches
    size = cell * (count - 0.5 - left), cell * count
    scale = scale_of(ax, *size) * min(1.0, cell * 72 * 0.7 / FONT)
    heads = [*(["prefix"] if prefix else []), *names]
    room = CHARACTER * scale * longest + 0.4, CHARACTER * scale * max(map(columns, heads)) + 0.3
    new, ax = ax is None, axes_of(ax, max(size[0] + room[0], 3.0), size[1] + room[1])
    handles = _draw_mask(ax, tree.ancestor_mask(), prefix)
    font: Look = {"family": families(), "size": FONT * scale, **PLAIN}
    ax.set_yticks(range(count), [row + " " * (longest - columns(row)) for row in rows], **font)
    ax.set_xticks([*([-1.6] if prefix else []), *range(count)], heads, rotation=90, **font)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    ax.set(xlim=(left, count - 0.5), ylim=(count - 0.5, -0.5))
    _legend_below(ax, handles, new)
    return ax


def _draw_mask(ax: Axes, mask: np.ndarray, prefix: int) -> list[Any]:
    """Draw the cells; return the legend's handles."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    nodes = np.arange(len(mask))
    edges = np.arange(len(mask) + 1) - 0.5
    colours = ListedColormap([WHITE, SKY, BLUE])
    seen = mask + np.eye(len(mask))
    ax.pcolormesh(edges, edges, seen, cmap=colours, vmin=0, vmax=2, edgecolors=PALE, linewidth=0.5, gid="mask")
    ax.scatter(nodes, nodes, s=6, c=WHITE, zorder=3, gid="itself")
    handles = [
        Patch(fc=BLUE, label="a row sees itself"),
        Patch(fc=SKY, label="its ancestors"),
        Patch(fc=WHITE, ec=GREY, lw=0.5, label="nothing else"),
    ]
    if not prefix:
        return handles
    look: Look = {"fc": "#D5ECF9", "ec": GREY, "hatch": "///", "lw": 0.5}
    ax.add_patch(Rectangle((-2.5, -0.5), 1.8, len(mask), gid="prefix", **look))
    return [*handles, Patch(label=f"the prefix of {prefix}", **look)]


def _tree_of(data: Any, function: str) -> TokenTree:
    tree = getattr(data, "tree", data)
    if not isinstance(tree, TokenTree):
        hint = ": a result has many, draw one of result.steps" if hasattr(data, "steps") else ""
        raise InputError(f"{function} draws a TokenTree or a Step, not a {type(data).__name__}{hint}")
    return tree


def _labels(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InputError(f"a {type(tokenizer).__name__} is no tokenizer: it has no `decode` that makes text of ids")
    return [shown(token_text(tokenizer, token)) for token in tokens]
