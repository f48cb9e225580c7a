"""Earlier passages that a row's text runs along, value after value: a form that is filled in again.

Knows: token ids, where they occurred (`text_index`).  Does not know: rows, trees, models.

A form is known word for word, and every value breaks the match.  So the last places are kept where the text agreed with
an earlier one for a few tokens.  The form goes on shortly after such a place: at a token that the passages behind these
places have in common.  And after that token, a passage is a better witness than a short context.  Alignment of texts
with gaps is old (Smith and Waterman 1981); here the gaps are as long as a value.
"""

from collections.abc import Sequence
from itertools import islice

from specinfer.drafts.text_index import BREAK, TextIndex

LEVEL = 3  # of `text_index.LENGTHS`: so many tokens must agree
PASSAGES = 8  # that are kept, the newest
SPAN = 16  # tokens of a passage, and tokens of the row's text after which a place is forgotten
DOUBT = 1.0  # passages that are thought of, in which a token is not


class Passages:
    """The places that a row's text agreed with of late, and what stands behind them."""

    def __init__(self) -> None:
        self.places: dict[tuple[TextIndex, int], tuple[int, int]] = {}  # (in, ahead of the row) -> (at, row's length)
        self.texts: list[list[int]] = []  # the passages, the newest last

    def extend(self, tokens: Sequence[int], text: TextIndex, indices: Sequence[TextIndex]) -> None:
        """Append tokens to a row's text, and follow the earlier texts."""
        for token in tokens:
            text.extend([token])
            context, length = tuple(text.ids[-text.lengths[LEVEL] :]), len(text.ids)
            for index in indices:
                for at in reversed([*islice(index.places(context, LEVEL), PASSAGES)]):
                    self.places.pop((index, at - length), None)
                    self.places[index, at - length] = at, length
        kept = [(key, place) for key, place in self.places.items() if place[1] > len(text.ids) - SPAN][-PASSAGES:]
        self.places = dict(kept)
        self.texts = [_passage(index, at) for (index, _), (at, _) in kept]

    def after(self, token: int) -> dict[int, float]:
        """Return how many passages go on how after a token."""
        counts: dict[int, float] = {}
        for text in self.texts:
            if token in text[:-1]:
                successor = text[text.index(token) + 1]
                counts[successor] = counts.get(successor, 0) + 1
        return counts

    def resumed(self, count: int) -> dict[int, float]:
        """Return the likeliest tokens where passages are resumed, and their probabilities.

        Tokens that are in more passages come first, then those that come sooner.
        """
        found: dict[int, list[int]] = {}
        for text in self.texts:
            for token in dict.fromkeys(text):
                found.setdefault(token, []).append(text.index(token))
        probabilities, left = {}, 1.0
        for token in sorted(found, key=lambda each: (-len(found[each]), sum(found[each]) / len(found[each])))[:count]:
            probabilities[token] = left * len(found[token]) / (len(self.texts) + DOUBT)
            left -= probabilities[token]
        return probabilities


def _passage(index: TextIndex, at: int) -> list[int]:
    """Return what stands at a position, up to the end of its text."""
    text = index.ids[at : at + SPAN].tolist()
    return text[: text.index(BREAK)] if BREAK in text else text
