"""The still picture of one tree: an SVG that stands alone, light or dark as the reader's system is.

Knows: the description of a drawn step.  Does not know: where it came from, pages, scripts.

Light colours are attributes, so that any renderer shows them.  A style adds the dark ones.  Its rules name a class of
this picture, because a style inside a notebook's page applies to the whole page.
"""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from specinfer.tree.drawing import STATES, DrawnNode, columns
from specinfer.viz.description import Description, DrawnStep
from specinfer.viz.style import DARK, LIGHT, colour, edge, shapes, style

LONGEST = 20  # characters of a token's text
CHARACTER, HEIGHT, ROW, GAP, MARGIN, PADDING = 7.6, 26, 36, 24, 16, 7  # pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Word(NamedTuple):
    """A piece of text in a node's box."""

    text: str
    colour: str
    size: float
    weight: int | None = None

    @property
    def width(self) -> float:
        """In pixels."""
        return CHARACTER * columns(self.text)


SPACE = 0.7 * CHARACTER  # between two words


def svg_of(description: Description) -> str:
    """Return a picture of the tree, or of the one that gained most."""
    step, signs = description.best, shapes(description.drafts)
    nodes = step.drawing.nodes
    words = [_words(node, signs) for node in nodes]
    widths = [2 * PADDING + sum(word.width + SPACE for word in row) - SPACE for row in words]
    *lefts, end = step.drawing.lefts(widths, GAP)
    corners = [(MARGIN + lefts[n.depth], MARGIN + ROW * y) for n, y in zip(nodes, step.drawing.lines, strict=True)]
    legend = _legend(step, description.drafts, signs)
    bottom = max(y for _, y in corners) + HEIGHT + ROW
    width, height = max(end - GAP, CHARACTER * columns(legend)) + 2 * MARGIN, bottom + MARGIN
    parts = [_element("rect", fill="paper", x="0", y="0", width=width, height=height, rx=10)]
    for node, corner in zip(nodes[1:], corners[1:], strict=True):
        x, y = corners[node.parent]
        parts.append(_edge(node, (x + widths[node.parent], y), corner))
    for node, corner, box_width, row in zip(nodes, corners, widths, words, strict=True):
        parts += _box(node, corner, box_width, row)
    parts.append(_element("text", legend, "soft", x=MARGIN, y=bottom + 2, font_size=12))
    title = f"token tree of {len(step.tree) - 1} drafted nodes, {len(step.path)} accepted"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="specinfer-svg" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="12.5">\n'
        f"<title>{title}</title>\n<style>{_dark()}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _words(node: DrawnNode, signs: list[str]) -> list[Word]:
    """Return what a node's box holds: who drafted it, its text, its probability, its mark."""
    text = node.text.replace("␠", "␣")  # few fonts have ␠
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    ink = style(node).ink
    words = [
        Word("".join(signs[draft] for draft in node.drafts), colour(node), 9.5),
        Word(text, ink, 12.5, 600 if style(node).width > 1 else None),
        Word(node.figure, "soft", 10.5),
        Word(node.mark, ink, 11.5),
    ]
    return [word for word in words if word.text]


def _box(node: DrawnNode, corner: tuple[float, float], width: float, words: list[Word]) -> Iterator[str]:
    """Return a node's box and words, from its upper left corner on."""
    (x, y), shape = corner, style(node)
    box = {"x": x, "y": y, "width": width, "height": HEIGHT, "rx": shape.corner * HEIGHT}
    yield _element("rect", "", shape.fill, shape.line, shape.dashes, stroke_width=shape.width, **box)
    x += PADDING
    for word in words:
        placed = {"x": x, "y": y + 17.5, "font_size": word.size, "font_weight": word.weight}
        yield _element("text", word.text, word.colour, **placed)
        x += word.width + SPACE


def _edge(node: DrawnNode, start: tuple[float, float], corner: tuple[float, float]) -> str:
    """Return the line from the upper right corner of the parent's box to the upper left one of the node's."""
    (x, y), (to_x, to_y), (width, dashes) = start, corner, edge(node)
    y, to_y, middle = y + HEIGHT / 2, to_y + HEIGHT / 2, (x + to_x) / 2
    curve = f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    return _element("path", "", "", style(node).line, dashes, d=curve, stroke_width=width, stroke_linecap="round")


def _element(
    tag: str, text: str = "", fill: str = "", line: str = "", dashes: tuple[int, ...] = (), **attributes: object
) -> str:
    """Return an element.  Fill and line are names of the palette.  Attributes that are None or "" are left out."""
    given = {
        "class": " ".join(filter(None, [fill, line and f"{line}-line"])),
        "fill": LIGHT.get(fill, "none"),
        "stroke": LIGHT.get(line),
        "stroke-dasharray": " ".join(map(str, dashes)),
        "xml:space": "preserve" if text else None,
    }
    for name, value in attributes.items():
        given[name.replace("_", "-")] = str(round(value, 1) if isinstance(value, float) else value or "")
    written = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f"<{tag}{written}>{escape(text)}</{tag}>" if text else f"<{tag}{written}/>"


def _legend(step: DrawnStep, names: list[str], signs: list[str]) -> str:
    drafts = [f"{signs[draft]} {names[draft]}" for draft in step.drawing.drafts]
    marks = [" ".join(STATES[state]) for state in step.drawing.states if STATES[state][0]]
    return "   ".join([*drafts, *marks, *(["% by the draft"] if drafts else [])])


def _dark() -> str:
    """Return the style that a dark system adds."""
    rules = [f".specinfer-svg .{name}{{fill:{c}}}.specinfer-svg .{name}-line{{stroke:{c}}}" for name, c in DARK.items()]
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
