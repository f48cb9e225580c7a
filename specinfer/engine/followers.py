"""What followed each token so far: how a text goes on where its grammar leaves little to choose.

White space, for one, is free in most forms, yet a text writes it after the next key as it did after the last ones.

Knows: one row's ids.  Does not know: grammars, trees, models.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from specinfer.grammar.matcher import Mask

OTHERS, UNSEEN = 1.0, 3.0  # tokens that have not followed a token, and those that a text lacks, count for so many


class Followers:
    """Counts of the tokens that followed each token in a row's prompt and text, and of all tokens in the text.

    Args:
        start: ids before the text.
    """

    def __init__(self, start: int) -> None:
        self.start, self.read = start, 0
        self.after: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.text: Counter[int] = Counter()

    def extend(self, ids: Sequence[int]) -> None:
        """Count what is new in a row's ids, the prompt's included."""
        for number in range(self.read, len(ids)):
            if number:
                self.after[ids[number - 1]][ids[number]] += 1
            if number >= self.start:
                self.text[ids[number]] += 1
        self.read = len(ids)

    def chances(self, token: int, allowed: Mask) -> dict[int, float]:
        """Return the probabilities of allowed tokens after a token; those that were never seen share what is left.

        What followed the token counts most; behind that stands what the text holds, wherever it is.
        """
        followed, held = (
            {other: count for other, count in counts.items() if allowed[other]}
            for counts in (self.after.get(token, Counter[int]()), self.text)
        )
        share = OTHERS / (sum(held.values()) + UNSEEN)  # for each token of the text
        total = sum(followed.values()) + OTHERS
        return {other: (followed.get(other, 0) + share * held.get(other, 0)) / total for other in {**followed, **held}}
