"""The still picture of one tree: an SVG that stands alone, light or dark as the reader's system is.

Knows: trees and what became of their nodes.  Does not know: pages, scripts.

Light colours are attributes, so that any renderer shows them; a style adds the dark ones.  Its rules name a class of
their own, because a style inside a notebook's page holds for all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

from specinfer.results import State
from specinfer.tree import tidy
from specinfer.tree.text import ACCEPTED, BONUS, REJECTED, columns, percent
from specinfer.viz.model import DrawnStep, draft_names, tokenizer_of, views
from specinfer.viz.rescoring import BY_HAND
from specinfer.viz.token_text import token_text

SHAPES = "●▲■◆★✚"  # of drafts, by id, as on the page
MARKS = {State.ACCEPTED: ACCEPTED, State.CUT: ACCEPTED, State.REJECTED: REJECTED}
LONGEST = 20  # characters of a token's text
CHARACTER, HEIGHT, ROW, GAP, MARGIN = 7.6, 26, 36, 24, 16  # pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
LIGHT = {"paper": "#ffffff", "ink": "#1d1f23", "soft": "#5b6068", "faint": "#b9bcc2", "root": "#dcdcd8"}
DARK = {"paper": "#14161a", "ink": "#e8e9eb", "soft": "#a2a8b1", "faint": "#565c66", "root": "#33373e"}
LIGHT |= {f"by{i}": c for i, c in enumerate(("#0068a8", "#b84a00", "#00795a", "#a3457f", "#7a6a00", "#4d5a67"))}
DARK |= {f"by{i}": c for i, c in enumerate(("#62b5f0", "#f2a65a", "#45cfa4", "#e89cc8", "#dccb4a", "#a9b7c6"))}


@dataclass
class Chip:
    """A node, or the target's own token, as it is drawn."""

    text: str
    state: str  # a `State`, "drafted" or "bonus"
    parent: int  # -1 = none
    shapes: str = ""
    colour: str = "ink"  # of who drafted it
    figure: str = ""
    x: float = 0.0
    y: float = 0.0

    @property
    def on_path(self) -> bool:
        """Whether the target accepted it."""
        return self.state in (State.ACCEPTED, State.CUT)

    @property
    def mark(self) -> str:
        """The sign of its state, which does not depend on colours."""
        return (
            BONUS if self.state == "bonus" else next((sign for state, sign in MARKS.items() if state == self.state), "")
        )

    @property
    def width(self) -> float:
        """In pixels."""
        parts = [part for part in (self.shapes, self.text, self.figure, self.mark) if part]
        return 14 + CHARACTER * (sum(map(columns, parts)) + 0.7 * (len(parts) - 1))


def svg_of(thing: Any, tokenizer: Any = None) -> str:
    """Return a picture of a tree, of a step's, or of the one that gained most.

    Args:
        thing: a `TokenTree`, `Step`, `Result`, `Inspection` or `StepInspection`.
        tokenizer: from ids to text; by default what the thing was made with, else ids are shown.
    """
    view = max(views(thing), key=lambda view: len(view.path))
    names = draft_names(thing)
    shapes = ["✎" if name == BY_HAND else SHAPES[draft % len(SHAPES)] for draft, name in enumerate(names)]
    chips = _chips(view, tokenizer or tokenizer_of(thing), shapes)
    bottom = _place(chips, view)
    right = max(chip.x + chip.width for chip in chips) + MARGIN
    words = _words(view, names, shapes)
    width, height = max(right, 2 * MARGIN + CHARACTER * columns(words)), bottom + ROW + MARGIN
    title = f"token tree of {len(view.tree) - 1} drafted nodes, {len(view.path)} accepted"
    parts = [_box("paper", 0, 0, width, height, 10), *(_edge(chips, i) for i in range(1, len(chips)))]
    parts += [_chip(chip) for chip in chips]
    parts.append(_text(MARGIN, bottom + ROW + 2, words, "soft"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="specinfer-svg" role="img" width="{width:.0f}" '
            f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="12.5">',
            f"<title>{escape(title)}</title>\n<style>{_dark()}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _chips(view: DrawnStep, tokenizer: Any, shapes: Sequence[str]) -> list[Chip]:
    """Return what is drawn: the nodes, then the target's own token if there is one."""
    tree = view.tree
    states: Sequence[str] = view.states or [State.ROOT, *["drafted"] * (len(tree) - 1)]
    chips = []
    for node, (token, state) in enumerate(zip(tree.tokens.tolist(), states, strict=True)):
        drafts = list(dict.fromkeys(draw.draft for draw in tree.draws[node]))
        chip = Chip(_label(tokenizer, token), state, int(tree.parents[node]))
        if node > 0:
            chip.shapes = "".join(shapes[draft] for draft in drafts)
            chip.colour = f"by{drafts[0] % 6}"
            by_hand = view.inspection is not None and view.inspection.nodes[node].q is None
            chip.figure = "" if by_hand else percent(tree.probability(node))
        chips.append(chip)
    if view.bonus is not None:
        chips.append(Chip(_label(tokenizer, view.bonus), "bonus", view.end))
    return chips


def _label(tokenizer: Any, token: int) -> str:
    """Return a token's text in signs that fonts have, and not too long."""
    text = token_text(tokenizer, token).replace("␠", "␣")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _place(chips: Sequence[Chip], view: DrawnStep) -> float:
    """Put chips in columns by depth and lines by the tidy layout; return the lowest edge."""
    lines, depths = tidy(view.tree.parents, None if view.bonus is None else view.end)
    widths = [0.0] * (int(depths.max()) + 1)
    for chip, depth in zip(chips, depths.astype(int), strict=True):
        widths[depth] = max(widths[depth], chip.width)
    lefts = list(accumulate(widths, lambda left, width: left + width + GAP, initial=float(MARGIN)))
    for chip, line, depth in zip(chips, lines.tolist(), depths.astype(int), strict=True):
        chip.x, chip.y = lefts[depth], MARGIN + line * ROW
    return max(chip.y for chip in chips) + HEIGHT


def _chip(chip: Chip) -> str:
    """Return a chip's box and words."""
    bonus, root = chip.state == "bonus", chip.state == State.ROOT
    fill = "ink" if bonus else "root" if root else "paper"
    line = "ink" if bonus else chip.colour if chip.on_path else "soft" if root else "faint"
    dashes = "4 3" if chip.state in (State.UNREACHED, State.CUT) else ""
    box = _box(
        fill,
        chip.x,
        chip.y,
        chip.width,
        HEIGHT,
        13 if bonus else 3 if root else 6,
        line,
        2 if chip.on_path else 1,
        dashes,
    )
    words, x = [], chip.x + 7
    ink = "paper" if bonus else "ink" if chip.on_path or root or chip.state == "drafted" else "soft"
    for part, colour, size in (
        (chip.shapes, chip.colour, 9.5),
        (chip.text, ink, 12.5),
        (chip.figure, "soft", 10.5),
        (chip.mark, ink, 11.5),
    ):
        if part:
            words.append(
                _text(x, chip.y + 17.5, part, colour, size, bold=part is chip.text and (chip.on_path or bonus or root))
            )
            x += CHARACTER * (columns(part) + 0.7)
    return box + "".join(words)


def _edge(chips: Sequence[Chip], place: int) -> str:
    """Return the line from a chip's parent to it: thick where accepted, dotted to the target's own token."""
    chip, parent = chips[place], chips[chips[place].parent]
    x, y, to_y, half = (
        parent.x + parent.width,
        parent.y + HEIGHT / 2,
        chip.y + HEIGHT / 2,
        (chip.x - parent.x - parent.width) / 2,
    )
    bonus = chip.state == "bonus"
    colour, width = ("ink", 2.5) if bonus else (chip.colour, 3.5) if chip.on_path else ("faint", 1.2)
    dashes = "1 4" if bonus else "3 3" if chip.state == State.UNREACHED else ""
    curve = f"M{x:.1f} {y:.1f}C{x + half:.1f} {y:.1f} {x + half:.1f} {to_y:.1f} {chip.x:.1f} {to_y:.1f}"
    return (
        f'<path class="{colour}-line" d="{curve}" fill="none" stroke="{LIGHT[colour]}" stroke-width="{width}" '
        f'stroke-linecap="round"{_dashed(dashes)}/>'
    )


def _box(
    fill: str,
    x: float,
    y: float,
    width: float,
    height: float,
    radius: float,
    line: str = "",
    thick: float = 0,
    dashes: str = "",
) -> str:
    stroke = f' stroke="{LIGHT[line]}" stroke-width="{thick}"{_dashed(dashes)}' if line else ""
    classes = f"{fill} {line}-line" if line else fill
    return (
        f'<rect class="{classes}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{LIGHT[fill]}"{stroke}/>'
    )


def _text(x: float, y: float, text: str, colour: str, size: float = 12, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" fill="{LIGHT[colour]}" font-size="{size}"{weight} '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def _dashed(dashes: str) -> str:
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def _words(view: DrawnStep, names: Sequence[str], shapes: Sequence[str]) -> str:
    """Return the legend."""
    drafts = sorted({draw.draft for draws in view.tree.draws for draw in draws})
    words = [f"{shapes[draft]} {names[draft]}" for draft in drafts]
    if view.states is not None:
        words += [f"{ACCEPTED} accepted", f"{REJECTED} rejected", f"{BONUS} the target's own"]
    return "   ".join([*words, "% by the draft"] if drafts else words)


def _dark() -> str:
    """Return the style that a dark system adds."""
    rules = [f".specinfer-svg .{name}{{fill:{c}}}.specinfer-svg .{name}-line{{stroke:{c}}}" for name, c in DARK.items()]
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
