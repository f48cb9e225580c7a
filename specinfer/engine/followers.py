"""What followed each token so far: how a text goes on where its grammar leaves little to choose.

White space, for one, is free in most forms, yet a text writes it after the next key as it did after the last ones.

Knows: one row's ids.  Does not know: grammars, trees, models.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from specinfer.grammar.matcher import Mask

NEW, UNSEEN = 1.0, 3.0  # what no token has followed, and what the text does not hold, count for as many tokens


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
        for place in range(self.read, len(ids)):
            if place:
                self.after[ids[place - 1]][ids[place]] += 1
            if place >= self.start:
                self.text[ids[place]] += 1
        self.read = len(ids)

    def chances(self, token: int, allowed: Mask) -> dict[int, float]:
        """Return the probabilities of allowed tokens after a token; those that were never seen share what is left.

        What followed the token counts most; behind that stands what the text holds, wherever it is.
        """
        followed, held = (
            {other: count for other, count in seen.items() if allowed[other]}
            for seen in (self.after.get(token, {}), self.text)
        )
        new = NEW / (sum(held.values()) + UNSEEN)  # for each token of the text
        total = sum(followed.values()) + NEW
        return {other: (followed.get(other, 0) + new * held.get(other, 0)) / total for other in {**followed, **held}}
