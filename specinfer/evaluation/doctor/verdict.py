"""The meaning of a draft's figures, in words: few rules, in one table.

Knows: shares of right tokens, shares of cost.  Does not know: how they were measured.
"""

from collections.abc import Callable
from dataclasses import dataclass

MISFIT = 0.1  # of a draft that fits, the first choice is right at least so often
GOOD = 0.4  # ... and of a good one
REACHED = 0.75  # share of the target's vocabulary that the proposals of a whole one span at least
COVERED = 0.9  # share of the text's tokens that a vocabulary should hold
RANKED = 0.4  # share of the right tokens among the candidates that should come first
KEPT = 0.5  # share of the hit rate at depth 1 that should be left at depth 2
COSTLY = 0.5  # of a target pass: a level that costs more pays for few levels
GRADES = ("good", "weak", "bad")


@dataclass(frozen=True)
class Signs:
    """The figures that the rules read.

    Attributes:
        first: by depth, the share of positions where the draft's first choice is the target's token, given the true
            tokens before it.  If every token were as hard as the next, it would be the same at all depths.
        among: the share where the target's token is among all candidates kept, at depth 1.
        lookup: whether the draft only looks up text, and was not trained.
        covered: the share of the target's tokens that are in the draft's vocabulary.
        reach: the highest token id that it proposed, as a share of the target's vocabulary.
        level: seconds of a level of a chain over seconds of a plain target pass.
    """

    first: list[float]
    among: float
    lookup: bool = False
    covered: float = 1.0
    reach: float = 1.0
    level: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the draft was made for this kind of target, and is read as it was made."""
        return self.lookup or self.first[0] >= MISFIT

    @property
    def second(self) -> float:
        """The share at depth 2; of texts without it, that of depth 1."""
        return self.first[1] if len(self.first) > 1 else self.first[0]


RULES: tuple[tuple[str, Callable[[Signs], bool], str], ...] = (  # grade at best, when, what is said
    (
        "bad",
        lambda s: not s.fits,
        "It does not fit this target: its first choice is right at {first:.0%} of the positions. Likely causes: it was "
        "trained for another target or chat template, it reads wrong layers or by other conventions (norms, offsets), "
        "its vocabulary map is ignored, or the target is quantised more coarsely.",
    ),
    (
        "bad",
        lambda s: not s.fits and s.reach < REACHED,
        "It proposes nothing above the first {reach:.0%} of the vocabulary: its map (d2t) is probably ignored.",
    ),
    (
        "weak",
        lambda s: not s.lookup and s.among >= RANKED and s.first[0] < RANKED * s.among,
        "The right token is among its candidates at {among:.0%} of the positions, and first of them at {first:.0%}: "
        "right tokens are badly ranked, as by a wrong last norm or output matrix.",
    ),
    (
        "weak",
        lambda s: s.fits and not s.lookup and s.second < KEPT * s.first[0],
        "Its second token is right at {second:.0%} of the positions, its first one at {first:.0%}: the state that it "
        "hands on is wrong, or that state's norm, or it was trained for one step.",
    ),
    (
        "weak",
        lambda s: s.covered < COVERED,
        "Its vocabulary holds {covered:.0%} of the target's tokens, and it never proposes the others.",
    ),
    (
        "weak",
        lambda s: s.lookup and s.first[0] < GOOD,
        "This text seldom repeats itself: what followed before is right at {first:.0%} of the positions.",
    ),
    (
        "weak",
        lambda s: s.fits and not s.lookup and s.first[0] < GOOD,
        "Its first choice is right at {first:.0%} of the positions: it was trained little, or on other text.",
    ),
    ("good", lambda s: s.level > COSTLY, "A level costs {level:.0%} of a plain target pass: only few levels can pay."),
)
FINE = "It fits this target: its first choice is right at {first:.0%} of the positions."


def verdict(signs: Signs) -> tuple[str, str]:
    """Return a grade of `GRADES`, the worst that a rule gives, and the words of the first two rules that apply."""
    found = [(grade, words) for grade, applies, words in RULES if applies(signs)]
    grade = max((grade for grade, _ in found), key=GRADES.index, default="good")
    said = [words for _, words in found] if grade != "good" else [FINE, *(words for _, words in found)]
    figures = vars(signs) | {"first": signs.first[0], "second": signs.second}
    return grade, " ".join(words.format(**figures) for words in said[:2])
