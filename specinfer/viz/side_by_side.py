"""Two results on one text, pass by pass: a tree against a sequence, say.

Knows: two results and how each is described.  Does not know: how they are painted.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from specinfer.common.display import Displayed
from specinfer.common.token_text import Tokenizer
from specinfer.errors import InputError
from specinfer.viz.description import Description, describe

if TYPE_CHECKING:
    from specinfer.evaluation.inspect.inspection import Inspection
    from specinfer.results import Result

NAMES = ("tree", "sequence")


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

    first: "Result | Inspection"
    second: "Result | Inspection"
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
