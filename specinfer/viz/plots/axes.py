"""Parts that all pictures share: the meaning of colours, Axes to draw into, legends, and text that any font can draw.

Knows: matplotlib, which it imports when a picture is drawn.  Does not know: what the pictures show.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from specinfer.common.values import installed
from specinfer.tree.drawing import columns
from specinfer.viz.style import BY_DRAFT, LIGHT, ON_DARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ft2font import FT2Font

PALE, GREY = LIGHT["pale"], LIGHT["soft"]
BLUE, RED, GREEN = BY_DRAFT[:3]
SKY, ORANGE, _, PINK, YELLOW, _ = ON_DARK  # lighter: for areas, under hatches

FONT = 8.0  # points, of tokens
WIDEST = 14.0  # inches, of a figure whose bars or cells can be made smaller
LARGEST = 60.0  # inches, of any figure
LINE = 0.18  # inches, of a legend
Options = dict[str, Any]  # keyword arguments of an artist
PLAIN: Options = {"parse_math": False, "usetex": False}  # of text that others wrote: $ is a dollar

HATCHES = ("", "////", "xxx", "...", "++", "\\\\\\\\")
LINES = ("-", "-.", ":", "--", "-", "-.")
DRAFTS = tuple(zip(BY_DRAFT, "o^sD*P", LINES, HATCHES, strict=True))  # by id: colour, mark, line style, hatch
STAGES = {  # of `Seconds`: name, colour, hatch
    "prefill": ("prefill", PALE, ".."),
    "target": ("verify (target)", SKY, ""),
    "draft": ("draft", ORANGE, "///"),
    "bookkeeping": ("bookkeeping", GREEN, "xx"),
}
METHODS = {  # colour, hatch, mark
    "autoregressive": (PALE, "", "o"),
    "sequence": (ORANGE, "///", "s"),
    "tree": (BLUE, "", "D"),
    "auto": (GREEN, "\\\\\\", "^"),
    "one-draft": (SKY, "++", "<"),
    "gate": (RED, "oo", ">"),
    "assisted": (PINK, "...", "v"),
    "prompt-lookup": (YELLOW, "xx", "P"),
    "generate": (GREY, "--", "X"),
    "graphs": ("black", "**", "*"),
}
OTHERS = ((PALE, "++", "<"), (GREY, "oo", ">"))  # of methods that are not named above


def part(name: str) -> ModuleType:
    """Return a module of matplotlib's."""
    return installed(f"matplotlib.{name}", "plots need matplotlib, which is not installed")


def axes_of(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, or the Axes of a new figure of pyplot's, of that size in inches."""
    if ax is not None:
        return ax
    return part("pyplot").subplots(figsize=(min(width, LARGEST), min(height, LARGEST)), layout="constrained")[1]


def scale_of(ax: Axes | None, width: float, height: float) -> float:
    """Return by what text must shrink where fewer inches are there than the data needs; 1 where there are enough."""
    if ax is None:
        there = LARGEST, LARGEST
    else:
        box, dpi = ax.get_window_extent(), ax.figure.dpi
        there = box.width / dpi, box.height / dpi
    return float(np.clip(min(there[0] / width, there[1] / height), 0.1, 1.0))


def upper_and_lower(ax: Axes | None, width: float, height: float, share: float) -> tuple[Axes, Axes]:
    """Return Axes with open frames: those of `axes_of` and, in their lower part, new ones with the same x axis.

    The lower ones are `share` times as high as what the upper ones keep.
    """
    ax = axes_of(ax, width, height)
    current, spec = ax.figure.gca(), ax.get_subplotspec()
    if spec is None:  # placed by hand
        box = ax.get_position(original=True)
        high = box.height * 0.92 / (1 + share)
        ax.set_position((box.x0, box.y1 - high, box.width, high))
        lower = ax.figure.add_axes((box.x0, box.y0, box.width, high * share), sharex=ax)
    else:
        parts = spec.subgridspec(2, 1, height_ratios=(1, share))
        ax.set_subplotspec(parts[0])
        lower = ax.figure.add_subplot(parts[1], sharex=ax)
    ax.figure.sca(current)  # what pyplot would draw into next
    ax.tick_params(labelbottom=False)
    open_frame(ax)
    open_frame(lower)
    return ax, lower


def open_frame(ax: Axes) -> None:
    """Leave the frame open, with a faint line at every tick of y."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=PALE, lw=0.6)
    ax.set_axisbelow(True)


def legend(ax: Axes, handles: Sequence[Any], below: bool = False, grow: bool = False, ncols: int = 0) -> None:
    """Put a legend above or below `ax`, in as many columns as fit; let the figure grow by its height if that is said.

    Handles in a list share the first one's label.
    """
    from matplotlib.legend_handler import HandlerTuple

    shared = [tuple(handle) if isinstance(handle, list) else (handle,) for handle in handles]
    labels = [first.get_label() for first, *_ in shared]
    inches = ax.get_window_extent().width / ax.figure.dpi
    fitting = int(inches / (0.06 * max(map(len, labels)) + 0.6))
    options: Options = {
        "loc": "upper left" if below else "lower left",
        "bbox_to_anchor": (0, 0 if below else 1),
        "ncols": ncols or max(1, min(len(handles), fitting)),
        "handlelength": 1.0 + max(map(len, shared)),
        "handler_map": {tuple: HandlerTuple(ndivide=None)},
    }
    made = ax.legend(shared, labels, frameon=False, prop={"family": families()[1:], "size": FONT}, **options)
    for text in made.get_texts():
        text.set(**PLAIN)
    if grow:
        figure: Any = ax.figure
        figure.set_figheight(figure.get_figheight() + LINE * -(-len(handles) // options["ncols"]))


def drawable(text: str, longest: int) -> str:
    """Return text in characters that a font has, and short."""
    fonts = _fonts()
    short = ""
    for character in text:
        known = any(font.get_char_index(ord(character)) for font in fonts)
        piece = character if known else "␣" if character == "␠" else character.encode("unicode_escape").decode()
        if columns(short + piece) > longest:
            return short + "…"
        short += piece
    return short


def families() -> list[str]:
    """Return the font families of tokens, in order of preference."""
    return ["monospace", *part("font_manager").FontProperties().get_family(), "DejaVu Sans"]


def _fonts() -> list[FT2Font]:
    """Return the fonts of tokens, as far as they are installed."""
    manager, fonts = part("font_manager"), []
    for family in families():
        try:
            path = manager.findfont(manager.FontProperties(family=[family]), fallback_to_default=False)
        except ValueError:  # not installed: matplotlib passes over it likewise
            continue
        fonts.append(manager.get_font(path))
    return fonts
