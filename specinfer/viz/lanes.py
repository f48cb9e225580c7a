"""The still picture of two results on one text: a lane each, from left to right, with a block for each target pass.

Knows: descriptions, the elements of pictures.  Does not know: pages, scripts.
"""

from collections.abc import Iterator

from specinfer.viz.description import Description
from specinfer.viz.side_by_side import PairDescription
from specinfer.viz.style import BY_DRAFT
from specinfer.viz.svg import MARGIN, document, element

WIDTH, HEIGHT, LANE, BETWEEN = 720, 24, 64, 2.5  # pixels: of a lane, of a block; from lane to lane; between blocks


def lanes_of(pair: PairDescription) -> str:
    """Return the picture.  The fewer and longer the blocks, the fewer passes of the target the same text took."""
    parts = [element("rect", fill="paper", x=0, y=0, width=WIDTH + 2 * MARGIN, height=2 * LANE + 2 * MARGIN, rx=10)]
    longest = max(sum(len(step.tokens) for step in side.steps) for side in pair.sides)
    for number, (name, side) in enumerate(zip(pair.names, pair.sides, strict=True)):
        top = MARGIN + number * LANE
        parts.append(element("text", f"{name}: {side.title}", "ink", x=MARGIN, y=top + 12, font_size=12.5))
        parts += _blocks(side, top + 20, WIDTH / max(1, longest))
    legend = "A block is one pass of the target. Tokens of drafts are coloured, the target's own are grey."
    parts.append(element("text", legend, "soft", x=MARGIN, y=2 * LANE + MARGIN + 4, font_size=12))
    return document(pair.title, WIDTH + 2 * MARGIN, 2 * LANE + 2 * MARGIN, parts)


def _blocks(side: Description, y: float, unit: float) -> Iterator[str]:
    """Return the tokens of each pass, each in equal parts of the colours of those who drafted it."""
    x = float(MARGIN)
    for step in side.steps:
        shrink = 1 - BETWEEN / (unit * len(step.tokens)) if step.tokens else 1.0
        start, x = x, x + unit * len(step.tokens)
        for index, drafts in enumerate(step.authors):
            colours = [f"by{draft % len(BY_DRAFT)}" for draft in drafts] or ["faint"]
            width = unit * max(0.2, shrink) / len(colours)
            for part, colour in enumerate(colours):
                left = start + width * (index * len(colours) + part)
                yield element("rect", fill=colour, x=left, y=y, width=width, height=HEIGHT)
