"""How nodes and drafts look in every picture, and in a terminal: colours, shapes, lines.

Knows: states of nodes, draft ids.  Does not know: what draws.

The colours of drafts are from the palette of Okabe and Ito ("Color Universal Design", 2008), darkened on white and
lightened on black, so that text in them can be read.  What became of a node is told by mark, weight and line too.
"""

from typing import NamedTuple

from specinfer.tree.drawing import BONUS, DrawnNode

LIGHT = {"paper": "#ffffff", "panel": "#f7f7f5", "mark": "#fff3c4", "pale": "#dcdcd8"}
LIGHT |= {"ink": "#1d1f23", "soft": "#5b6068", "sign": "#868c95", "faint": "#b9bcc2"}
DARK = {"paper": "#14161a", "panel": "#1b1e23", "mark": "#4a4220", "pale": "#33373e"}
DARK |= {"ink": "#e8e9eb", "soft": "#a2a8b1", "sign": "#7d838d", "faint": "#565c66"}
BY_DRAFT = ("#0068a8", "#b84a00", "#00795a", "#a3457f", "#7a6a00", "#4d5a67")
LIGHT |= {f"by{draft}": colour for draft, colour in enumerate(BY_DRAFT)}
ON_DARK = ("#62b5f0", "#f2a65a", "#45cfa4", "#e89cc8", "#dccb4a", "#a9b7c6")
DARK |= {f"by{draft}": colour for draft, colour in enumerate(ON_DARK)}
SHAPES = "●▲■◆★✚"  # of drafts, by id


TERMINAL = {"by0": "34", "by1": "33", "by2": "32", "by3": "35", "by4": "36", "by5": "37"}  # codes of ECMA-48: colours
TERMINAL |= {"ink": "", "soft": "2", "paper": "7"}  # as the terminal's own palette has them; dim; reversed
ASCII = str.maketrans(  # what stands for a sign where an encoding has no better
    dict(zip(SHAPES, "123456", strict=True))
    | {"✎": "h", "✓": "*", "✗": "x", "✂": "/", "┄": ".", "├": "|", "└": "`", "─": "-", "│": "|"}
    | {"␠": "_", "⏎": "\\n", "⇥": "\\t", "∅": "''"}
)


class NodeStyle(NamedTuple):
    """How a node is drawn.  Colours are names of the palette, dashes pairs of lengths."""

    fill: str
    line: str  # of the box; "" = the colour of its draft
    ink: str
    width: float
    dashes: tuple[int, ...]
    corner: float  # radius, as a share of the box's height


STYLES = {
    "root": NodeStyle("pale", "soft", "ink", 1.5, (), 0.1),
    "drafted": NodeStyle("paper", "faint", "ink", 1.0, (), 0.25),
    "accepted": NodeStyle("paper", "", "ink", 2.0, (), 0.25),
    "cut": NodeStyle("paper", "", "ink", 2.0, (4, 3), 0.25),
    "rejected": NodeStyle("paper", "faint", "soft", 1.0, (), 0.25),
    "unreached": NodeStyle("paper", "faint", "soft", 1.0, (4, 3), 0.25),
    BONUS: NodeStyle("ink", "ink", "paper", 1.2, (), 0.5),
}

ACCEPTED_EDGE, BONUS_EDGE, BONUS_DASHES = 3.5, 2.5, (1, 4)  # widths, and dashes, of the lines to nodes
THIN_EDGE, LIKELY_EDGE = 0.7, 1.5  # of other nodes: a width, and what a probability of 1 adds


def style(node: DrawnNode) -> NodeStyle:
    """Return a node's style, with the colour of its draft where it has one."""
    found = STYLES[node.state]
    return found if found.line else found._replace(line=colour(node))


def colour(node: DrawnNode) -> str:
    """Return the colour of the first draft that proposed a node."""
    return by_draft(node.drafts[0]) if node.drafts else "ink"


def by_draft(draft: int) -> str:
    """Return the colour of a draft."""
    return f"by{draft % len(BY_DRAFT)}"


def terminal(node: DrawnNode) -> str:
    """Return a terminal's codes for a node's text."""
    bold = ["1"] if style(node).width > 1.2 else []
    return ";".join(filter(None, [*bold, TERMINAL[colour(node) if node.accepted else style(node).ink]]))


def edge(node: DrawnNode) -> tuple[float, tuple[int, ...]]:
    """Return width and dashes of the line to a node: the wider the likelier; on the accepted path widest."""
    if node.state == BONUS:
        return BONUS_EDGE, BONUS_DASHES
    width = ACCEPTED_EDGE if node.accepted else THIN_EDGE + LIKELY_EDGE * (node.probability or 0.0)
    return width, STYLES[node.state].dashes
