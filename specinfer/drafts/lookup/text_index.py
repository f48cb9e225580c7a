"""Next tokens of a text: earlier occurrences of its last tokens, and their successors there.

    `TextIndex`    where n-grams occurred in texts, and what followed them
    `Passages`     earlier passages that a row's text runs along, value after value: a form that is filled in again
    `successors`   what followed contexts of all lengths, blended

Knows: token ids.  Does not know: rows, trees, models.

For a few lengths a dictionary says where each n-gram was last followed by something.  Each position says where the same
n-gram was followed before, as the hash chains of deflate do (RFC 1951, section 4).  So a token is appended in constant
time.  A match between two of those lengths, or beyond the last, is found from the newest occurrences of the shorter
n-gram: they are compared backwards, token by token.  N-grams are told apart by 64-bit hashes.

A chat template puts a header before each message: ``<|im_start|>user`` and a new line, for example.  The text after one
header says nothing about the text after another.  So the first tokens after a special token are found by long contexts
alone.
A system message that the template writes by itself was said by nobody: it is not found at all.

What followed longer contexts is blended with what followed shorter ones by PPM's escape (Cleary and Witten 1984; method
C, Moffat 1990): a context that was seen n times with d different successors gives successor v probability
``count(v) / (n + d)`` and leaves ``d / (n + d)`` to the context that is one token shorter.  Nothing takes what the
shortest context leaves, so probabilities sum to less than one.  Contexts of several lengths often have the same
occurrences; then they take their turns in one sum.

A form is known word for word, but every value in it breaks the match.  So the places are kept where the text agreed
with an earlier one of late.  The form goes on soon after them, mostly at a token that many of the passages behind these
places have in common.  And then the passages say more about what comes next than the few tokens since the value.  So
they come before the short contexts.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from sys import getsizeof
from typing import NamedTuple

import numpy as np

LENGTHS, MAX_CONTEXT = (1, 2, 3, 4, 8, 16, 32), 64  # of indexed n-grams, and of the longest match
RECENT = 32  # occurrences of one n-gram that are counted at most, the newest first
HEADER = 3  # tokens after a special one that only longer contexts find
BREAK = -1  # stands between two texts
NUMBER = 32  # bytes of an int object, about
LEVEL = 3  # of `LENGTHS`: tokens that must agree
PASSAGES = 8  # that are read
SPAN = 16  # tokens of a passage, and tokens of the row's text after which a match is forgotten
AGREED = 0.75  # of the longest match; shorter ones are not read
UNSEEN = 1.0  # passages that are counted beside those that are read, in which no token is
CANDIDATES = 6  # tokens at which passages may be resumed
PRIOR = (1.0, 2.0)  # times that passages were right, and were asked, before any
NEGLIGIBLE = 1e-6  # probability that is left, below which no shorter context is asked
SHORT = 2  # tokens of a context that passages come before

Occurrence = tuple[int, int]  # length of the match, position of the token that followed


class TextIndex:
    """Texts, each of which may grow until the next one begins.

    Appending is safe beside readers in other threads: a position is found only when its token is there.

    Args:
        lengths: of the n-grams that are indexed, ascending.
        max_context: longest match, in tokens; at least the last of the lengths.
        special: ids of special tokens.

    Attributes:
        unsaid: tokens before this index are found by nothing, if they are read after it was set; they are the context
            of what follows.
    """

    def __init__(self, lengths: Sequence[int], max_context: int, special: Container[int] = ()) -> None:
        self.lengths, self.max_context, self.special, self.unsaid = tuple(lengths), max_context, special, 0
        self.header = 0  # where the newest header ends
        self.ids = array("i")
        self.start = 0  # of the newest text
        self.last: list[dict[int, int]] = [{} for _ in lengths]  # hash of an n-gram -> newest position that follows it
        self.before = [array("i") for _ in lengths]  # by position: the one before that follows the same n-gram, or -1

    @property
    def bytes(self) -> int:
        """Size in memory, about."""
        chains = sum(getsizeof(before) for before in self.before)
        tables = sum(getsizeof(last) + NUMBER * len(last) for last in self.last)
        return getsizeof(self.ids) + NUMBER * len(self.ids) + chains + tables

    def begin(self) -> None:
        """Begin a new text: no n-gram reaches back into the one before."""
        if self.ids:
            self.ids.append(BREAK)
            for before in self.before:  # which Ctrl-C in the text before may have left shorter
                before.extend([-1] * (len(self.ids) - len(before)))
        self.start = len(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens to the newest text, and index the n-grams that they follow."""
        longest = self.lengths[-1]
        for position, token in enumerate(ids, len(self.ids)):
            recent = tuple(self.ids[max(self.start, position - longest) :])
            self.ids.append(token)
            least = HEADER + 1 if position < self.header else 1  # tokens of a context that finds this one
            if token in self.special:
                self.header = position + HEADER + 1
            for n, last, before in zip(self.lengths, self.last, self.before, strict=True):
                gram = hash(recent[-n:])
                indexed = least <= n <= len(recent) and position >= self.unsaid
                before.append(last.get(gram, -1) if indexed else -1)
                if indexed:
                    last[gram] = position

    def texts(self, size: int) -> Iterator[list[int]]:
        """Return the texts that the last ``size`` ids hold, oldest first; the first may lack its beginning."""
        return texts_of(np.array(self.ids[len(self.ids) - size :], np.int32))

    def seen(self, context: tuple[int, ...]) -> bool:
        """Return whether anything followed the last tokens of a context."""
        return any(hash(context[-n:]) in last for n, last in zip(self.lengths, self.last, strict=True))

    def occurrences(self, context: tuple[int, ...], level: int, count: int = RECENT) -> list[Occurrence]:
        """Return the newest occurrences of the context's last ``lengths[level]`` tokens, the newest first.

        Matches are measured up to the next of the lengths, exclusive.
        """
        n, most = self.lengths[level], [*self.lengths, self.max_context + 1][level + 1] - 1
        if n > len(context):
            return []
        found: list[Occurrence] = []
        before, most = self.before[level], min(most, len(context))
        position = self.last[level].get(hash(context[-n:]), -1)
        while position >= 0 and len(found) < count:
            length = n
            while length < most and length < position and self.ids[position - length - 1] == context[-length - 1]:
                length += 1
            found.append((length, position))
            position = before[position]
        return found


def texts_of(ids: np.ndarray) -> Iterator[list[int]]:
    """Yield the texts, without empty ones, in ids (n,) with breaks between them."""
    for text in np.split(ids, np.flatnonzero(ids == BREAK)):
        if kept := text[text != BREAK].tolist():
            yield kept


class Match(NamedTuple):
    """Tokens of a row's text that agree with an earlier text."""

    earlier: TextIndex
    at: int  # where it goes on
    agreed: int  # tokens
    ended: int  # the row's length then


class Passages:
    """The places that one row's text agreed with of late, and the tokens behind them.

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
        """Return the successors of a token: those in the passages, or else a token that resumes them."""
        inside, expected = self._expected(token)
        right, asked = self.right[inside]
        return {successor: probability * right / asked for successor, probability in expected.items()}

    def _expected(self, token: int) -> tuple[bool, dict[int, float]]:
        """Return whether a token is in the passages, and its successors, were they right."""
        found = [text[text.index(token) + 1] for text in self.texts if token in text[:-1]]
        return bool(found), {each: found.count(each) / len(found) for each in found} if found else self.resumed


def successors(
    context: tuple[int, ...], indices: Sequence[TextIndex], power: float = 1.0, passages: Passages | None = None
) -> dict[int, float]:
    """Return successor -> probability by PPM-C, over all occurrences in some indices.

    Args:
        context: the last tokens, `max_context` at most.
        indices: at least one; the lengths of the first are those of the others, or the first few of them.
        power: of every escape; below 1, less is given to long contexts.
        passages: that the text runs along.
    """
    distribution: dict[int, float] = {}
    left, lengths = 1.0, indices[0].lengths
    for level in reversed(range(len(lengths))):
        if passages and passages.texts and lengths[level] == SHORT:
            left = _add(distribution, passages.successors(context[-1]), left)
        found = [(n, index.ids[at]) for index in indices for n, at in index.occurrences(context, level)]
        if not found:
            continue
        found.sort(key=lambda occurrence: -occurrence[0])
        counts: dict[int, int] = {}
        for (length, token), (shorter, _) in zip(found, [*found[1:], (lengths[level] - 1, 0)], strict=True):
            counts[token] = counts.get(token, 0) + 1
            if shorter < length:
                left = _blend(distribution, counts, power * (length - shorter), left)
        if left < NEGLIGIBLE:
            break
    return distribution


def _blend(distribution: dict[int, float], counts: dict[int, int], contexts: float, left: float) -> float:
    """Add the successors of contexts with the same occurrences; return the probability that is left."""
    total = sum(counts.values())
    share = 1 - (len(counts) / (total + len(counts))) ** contexts
    return _add(distribution, {token: share * count / total for token, count in counts.items()}, left)


def _add(distribution: dict[int, float], more: dict[int, float], left: float) -> float:
    """Add a distribution's part of the remaining probability; return the rest."""
    for token, probability in more.items():
        distribution[token] = distribution.get(token, 0.0) + left * probability
    return left * (1 - sum(more.values()))


def _passage(index: TextIndex, at: int) -> tuple[int, ...]:
    """Return the tokens from a position to the end of its text."""
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
