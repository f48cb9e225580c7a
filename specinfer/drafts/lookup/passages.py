"""Earlier passages that a row's text runs along, value after value: a form that is filled in again.

Knows: token ids, where they occurred (`text_index`).  Does not know: rows, trees, models.

A form is known word for word, but every value in it breaks the match.  So the places are kept where the text agreed
with an earlier one of late.  The form goes on soon after them, mostly at a token that many of the passages behind these
places have in common.  And then the passages say more about what comes next than the few tokens since the value.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.drafts.lookup.text_index import BREAK, TextIndex

LEVEL = 3  # of `text_index.LENGTHS`: so many tokens must agree
PASSAGES = 8  # that are read
SPAN = 16  # tokens of a passage, and tokens of the row's text after which a match is forgotten
AGREED = 0.75  # of the longest match; shorter ones are not read
UNSEEN = 1.0  # passages that are counted beside those that are read, in which no token is
CANDIDATES = 6  # tokens at which passages may be resumed
PRIOR = (1.0, 2.0)  # times that passages were right, and were asked, before any


class Match(NamedTuple):
    """Tokens of a row's text that agree with an earlier text."""

    earlier: TextIndex
    at: int  # where it goes on
    agreed: int  # tokens
    ended: int  # the row's length then


class Passages:
    """The places that one row's text agreed with of late, and what stands behind them.

    How often they are right is counted as the row's text grows, so that they propose little where nothing repeats.

    Attributes:
        texts: the passages, the newest last, no two equal.
    """

    def __init__(self) -> None:
        self.matches: list[Match] = []  # the newest last
        self.texts: list[list[int]] = []
        self.resumed: dict[int, float] = {}  # token with which the row's text returns to them -> probability
        self.right = {True: PRIOR, False: PRIOR}  # (times right, times asked) where the last token is in them, or not

    def extend(self, tokens: Sequence[int], text: TextIndex, indices: Sequence[TextIndex]) -> None:
        """Append tokens to the row's text, and follow the texts of the indices.

        A match takes over from those that end close before it in the same index.
        """
        if tokens and self.texts:
            inside, expected = self._expected(text.ids[-1])
            right, asked = self.right[inside]
            self.right[inside] = right + (tokens[0] in expected), asked + 1
        for token in tokens:
            text.extend([token])
            context = tuple(text.ids[-text.max_context :])
            for index in indices:
                new = index.occurrences(context, LEVEL, PASSAGES)
                passed = {at - ahead for _, at in new for ahead in range(SPAN)}
                self.matches = [each for each in self.matches if each.earlier is not index or each.at not in passed]
                self.matches += [Match(index, at, agreed, len(text.ids)) for agreed, at in reversed(new)]
        self.matches = [match for match in self.matches if match.ended > len(text.ids) - SPAN]
        least = AGREED * max((match.agreed for match in self.matches), default=0)
        found = [_passage(match.earlier, match.at) for match in self.matches if match.agreed >= least]
        self.texts = [list(passage) for passage in dict.fromkeys(found)][-PASSAGES:]
        self.resumed = _resumed(self.texts)

    def successors(self, token: int) -> dict[int, float]:
        """Return what comes after a token: what follows it in the passages, or else a token that resumes them."""
        inside, expected = self._expected(token)
        right, asked = self.right[inside]
        return {successor: probability * right / asked for successor, probability in expected.items()}

    def _expected(self, token: int) -> tuple[bool, dict[int, float]]:
        """Return whether a token is in the passages, and what comes after it, were they right."""
        found = [text[text.index(token) + 1] for text in self.texts if token in text[:-1]]
        return bool(found), {each: found.count(each) / len(found) for each in found} if found else self.resumed


def _passage(index: TextIndex, at: int) -> tuple[int, ...]:
    """Return what stands at a position, up to the end of its text."""
    ids = index.ids[at : at + SPAN].tolist()
    return tuple(ids[: ids.index(BREAK)] if BREAK in ids else ids)


def _resumed(texts: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return token -> probability: tokens of more passages first, then those that come sooner, one after the other."""
    found: dict[int, list[int]] = {}
    for text in texts:
        for token in dict.fromkeys(text):
            found.setdefault(token, []).append(text.index(token))
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), sum(item[1]) / len(item[1])))
    probabilities, left = {}, 1.0
    for token, seen in ranked[:CANDIDATES]:
        probabilities[token] = left * len(seen) / (len(texts) + UNSEEN)
        left -= probabilities[token]
    return probabilities
