"""The still picture of one tree: an SVG that stands alone, light or dark as the reader's system is.

Knows: the description of a drawn step.  Does not know: where it came from, pages, scripts.

Light colours are attributes, so that any renderer shows them.  A style adds the dark ones.  Its rules name a class of
this picture, because a style inside a notebook's page applies to the whole page.
"""

from collections.abc import Iterable, Iterator
from html import escape

from specinfer.tree.drawing import DrawnNode, columns
from specinfer.viz.description import Description
from specinfer.viz.style import DARK, LIGHT, by_draft, edge, style

LONGEST = 20  # characters of a token's text
CHARACTER, HEIGHT, ROW, GAP, MARGIN, PADDING, SPACE = 7.6, 26, 36, 24, 16, 7, 5.3  # pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
Word = tuple[str, str, float, int]  # in a node's box: text, colour, size, weight


def svg_of(description: Description) -> str:
    """Return a picture of the tree, or of the one to look at first."""
    step = description.best
    nodes = step.drawing.nodes
    words = [_words(node, description.shapes) for node in nodes]
    widths = [2 * PADDING - SPACE + sum(SPACE + CHARACTER * columns(text) for text, *_ in row) for row in words]
    *lefts, end = step.drawing.lefts(widths, GAP)
    corners = [(MARGIN + lefts[n.depth], MARGIN + ROW * y) for n, y in zip(nodes, step.drawing.lines, strict=True)]
    signs = [*description.legend([step]), *([["%", "by the draft"]] if step.tree.num_drafted else [])]
    legend = "   ".join(map(" ".join, signs))
    bottom = max(y for _, y in corners) + HEIGHT + ROW
    width, height = max(end - GAP, CHARACTER * columns(legend)) + 2 * MARGIN, bottom + MARGIN
    parts = [element("rect", fill="paper", x=0, y=0, width=width, height=height, rx=10)]
    for node, corner in zip(nodes[1:], corners[1:], strict=True):
        x, y = corners[node.parent]
        parts.append(_edge(node, (x + widths[node.parent], y), corner))
    for node, corner, box_width, row in zip(nodes, corners, widths, words, strict=True):
        parts += _box(node, corner, box_width, row)
    parts.append(element("text", legend, "soft", x=MARGIN, y=bottom + 2, font_size=12))
    title = f"token tree of {len(step.tree) - 1} drafted nodes, {len(step.path)} accepted"
    return document(title, width, height, parts)


def document(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Return a picture of some elements; lengths are in pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="specinfer-svg" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="12.5">\n'
        f"<title>{escape(title)}</title>\n<style>{_dark()}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _words(node: DrawnNode, shapes: list[str]) -> list[Word]:
    """Return the content of a node's box: who drafted it, its text, its probability, its mark."""
    text, ink = node.text.replace("␠", "␣"), style(node).ink  # few fonts have ␠
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    words = [
        *((shapes[draft], by_draft(draft), 9.5, 400) for draft in node.drafts),
        (text, ink, 12.5, 600 if style(node).width > 1 else 400),
        (node.figure, "soft", 10.5, 400),
        (node.mark, ink, 11.5, 400),
    ]
    return [word for word in words if word[0]]


def _box(node: DrawnNode, corner: tuple[float, float], width: float, words: list[Word]) -> Iterator[str]:
    """Return a node's box and words, from its upper left corner on."""
    (x, y), shape = corner, style(node)
    box = {"x": x, "y": y, "width": width, "height": HEIGHT, "rx": shape.corner * HEIGHT}
    yield element("rect", "", shape.fill, shape.line, shape.dashes, stroke_width=shape.width, **box)
    x += PADDING
    for text, ink, size, weight in words:
        yield element("text", text, ink, x=x, y=y + 17.5, font_size=size, font_weight=weight)
        x += CHARACTER * columns(text) + SPACE


def _edge(node: DrawnNode, start: tuple[float, float], corner: tuple[float, float]) -> str:
    """Return the line from the upper right corner of the parent's box to the upper left one of the node's."""
    (x, y), (to_x, to_y), (width, dashes) = start, corner, edge(node)
    y, to_y, middle = y + HEIGHT / 2, to_y + HEIGHT / 2, (x + to_x) / 2
    curve = f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    return element("path", "", "", style(node).line, dashes, d=curve, stroke_width=width, stroke_linecap="round")


def element(
    tag: str, text: str = "", fill: str = "", line: str = "", dashes: tuple[int, ...] = (), **attributes: object
) -> str:
    """Return an element.  Fill and line are names of the palette.  Without a line there is no stroke."""
    given = {
        "class": " ".join(filter(None, [fill, line and f"{line}-line"])),
        "fill": LIGHT.get(fill, "none"),
        "stroke": LIGHT.get(line),
        "stroke-dasharray": " ".join(map(str, dashes)),
        "xml:space": "preserve" if "  " in text else None,
    }
    for name, value in attributes.items():
        given[name.replace("_", "-")] = str(round(value, 1) if isinstance(value, float) else value)
    written = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f"<{tag}{written}>{escape(text)}</{tag}>" if text else f"<{tag}{written}/>"


def _dark() -> str:
    """Return the style that a dark system adds."""
    rules = [f".specinfer-svg .{name}{{fill:{c}}}.specinfer-svg .{name}-line{{stroke:{c}}}" for name, c in DARK.items()]
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
