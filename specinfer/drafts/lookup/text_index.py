"""Where n-grams occurred in texts, and what followed them: what the drafts without weights count.

Knows: token ids.  Does not know: rows, trees, models.

For a few lengths a dictionary says where each n-gram was last followed by something.  Each position says where the same
n-gram was followed before, as the hash chains of deflate do (RFC 1951, section 4).  So a token is appended in constant
time.  A match between two of those lengths, or beyond the last, is found from the newest occurrences of the shorter
n-gram: they are compared backwards, token by token.  N-grams are told apart by 64-bit hashes.

A chat template puts a header before each message, such as ``<|im_start|>user`` and a new line.  What follows one header
says nothing about what follows another.  So the first tokens after a special token are found by long contexts alone.
A system message that the template writes by itself was said by nobody: it is not found at all.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from sys import getsizeof

LENGTHS, MAX_CONTEXT = (1, 2, 3, 4, 8, 16, 32), 64  # of indexed n-grams, and of the longest match
RECENT = 32  # occurrences of one n-gram that are counted at most, the newest first
HEADER = 3  # tokens after a special one that only longer contexts find
BREAK = -1  # stands between two texts
NUMBER = 32  # bytes of an int object, about

Occurrence = tuple[int, int]  # length of the match, position of the token that followed


class TextIndex:
    """Texts, each of which may grow until the next one begins.

    Appending is safe beside readers in other threads: a position is found only when its token is there.

    Args:
        lengths: of the n-grams that are indexed, ascending.
        max_context: longest match, in tokens; at least the last of the lengths.
        special: ids of special tokens.
        unsaid: so many tokens, the first ones, are found by nothing; they are the context of what follows.
    """

    def __init__(self, lengths: Sequence[int], max_context: int, special: Container[int] = (), unsaid: int = 0) -> None:
        self.lengths, self.max_context, self.special, self.unsaid = tuple(lengths), max_context, special, unsaid
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
            for before in self.before:
                before.append(-1)
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
        """Yield the texts that the last ``size`` ids hold, oldest first; the first may lack its beginning."""
        kept = self.ids[len(self.ids) - size :]
        breaks = [-1, *(at for at, token in enumerate(kept) if token == BREAK), len(kept)]
        for left, right in pairwise(breaks):
            if right - left > 1:
                yield kept[left + 1 : right].tolist()

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
        position, before, most = (
            self.last[level].get(hash(context[-n:]), -1),
            self.before[level],
            min(most, len(context)),
        )
        while position >= 0 and len(found) < count:
            length = n
            while length < most and length < position and self.ids[position - length - 1] == context[-length - 1]:
                length += 1
            found.append((length, position))
            position = before[position]
        return found
