"""Two results on one text, pass by pass: a tree against a sequence, say; as data, and as a still picture.

The picture has a lane for each, from left to right, with a block for each target pass.

Knows: two results and how each is described, the elements of pictures.  Does not know: pages, scripts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from specinfer.common.display import Displayed
from specinfer.common.token_text import Tokenizer
from specinfer.errors import InputError
from specinfer.evaluation.inspect.inspection import Inspection
from specinfer.results import Result
from specinfer.viz.description import Description, describe
from specinfer.viz.style import by_draft
from specinfer.viz.svg import MARGIN, document, element

NAMES = ("tree", "sequence")
WIDTH, HEIGHT, LANE, BETWEEN = 720, 24, 64, 2.5  # pixels: of a lane, of a block; from lane to lane; between blocks


@dataclass(frozen=True)
class SideBySide(Displayed):
    """Two results (or inspections) on one prompt.  It displays itself as a result does.

    Attributes:
        first: a result.
        second: the other one.
        names: of the two results.

    Raises:
        InputError: one is no result, or the prompts differ.
    """

    first: Result | Inspection
    second: Result | Inspection
    names: tuple[str, str] = NAMES

    def __post_init__(self) -> None:
        prompts = [getattr(getattr(side, "result", side), "prompt_ids", None) for side in (self.first, self.second)]
        if None in prompts:
            kinds = " and ".join(type(side).__name__ for side in (self.first, self.second))
            raise InputError(f"{kinds} are not two results: give what generate or inspect returned")
        if prompts[0] != prompts[1]:
            raise InputError("the two results answer different prompts: give two results on one prompt")


@dataclass(frozen=True)
class PairDescription:
    """The description of two results."""

    names: tuple[str, str]
    sides: tuple[Description, Description]

    @property
    def title(self) -> str:
        """A title for a page."""
        return "; ".join(f"{name}: {side.title}" for name, side in zip(self.names, self.sides, strict=True))

    @property
    def plain(self) -> str:
        """Text for places that run no scripts."""
        return self.sides[0].plain

    @property
    def notes(self) -> list[str]:
        """Where the texts part, if they do."""
        first, second = ([token for step in side.steps for token in step.tokens] for side in self.sides)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        return [] if same == min(len(first), len(second)) else [f"The texts part after {same} tokens."]

    def to_dict(self) -> dict[str, object]:
        """Return what the page draws, ready for JSON: the names, a description a side, and notes."""
        return {"names": list(self.names), "sides": [side.to_dict() for side in self.sides], "notes": self.notes}


def describe_pair(pair: SideBySide, tokenizer: Tokenizer | None = None) -> PairDescription:
    """Describe both sides; the tokenizer is as in `describe`."""
    return PairDescription(pair.names, (describe(pair.first, tokenizer), describe(pair.second, tokenizer)))


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
            colours = [by_draft(draft) for draft in drafts] or ["faint"]
            width = unit * max(0.2, shrink) / len(colours)
            for part, colour in enumerate(colours):
                left = start + width * (index * len(colours) + part)
                yield element("rect", fill=colour, x=left, y=y, width=width, height=HEIGHT)
