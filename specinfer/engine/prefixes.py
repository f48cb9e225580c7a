"""What was read, and which of it a text begins with.

Knows: token ids, which models have read them, where their keys and values are.
Does not know: sessions, rows under way, how much memory there is.

Prefixes stand in the order of their ids.  Those that a text shares most with are the neighbours of its place among
them, so finding them takes a few comparisons, however many there are.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.attention import TreeCache
from specinfer.common.lock import Lock

LEAST = 16  # tokens of a beginning; shorter ones are not worth a pass of their own
NAME = attrgetter("name")  # what prefixes are ordered by


@dataclass(eq=False, repr=False)
class Cached:
    """Tokens that one model has read.

    Attributes:
        ids: (n,).
        cache, row: where their keys and values are.
        owner: whose they are: another session of the same owner can begin with them.
    """

    ids: Sequence[int] | np.ndarray
    cache: TreeCache
    row: int = 0
    owner: object = None

    def common(self, ids: Sequence[int] | np.ndarray) -> int:
        """Return how many tokens, of (m,) ids, these ones begin with."""
        size = min(len(self.ids), len(ids))
        differ = np.asarray(self.ids[:size]) != np.asarray(ids[:size])
        return int(differ.argmax()) if differ.any() else size

    def copy(self) -> "Cached":
        """Return the same in a cache of its own."""
        ids = np.array(self.ids, np.int64)
        return Cached(ids, self.cache.copy_of(self.row, len(ids)), 0, self.owner)


@dataclass(eq=False, repr=False)
class Prefix:
    """Tokens that were read.

    Attributes:
        key: of those that may share it; it is hashable.
        caches: the target's, then those of drafts.
        first: the first token whose auxiliary hidden states are known.
        states: they, (m, K, H) each; none without `TreeSession.aux_layers`.
    """

    key: tuple[object, ...]
    caches: Sequence[Cached]
    first: int = 0
    states: Sequence[Tensor] = ()

    @property
    def ids(self) -> np.ndarray:
        """The tokens that the target has read, (n,)."""
        return np.asarray(self.caches[0].ids)

    @cached_property
    def name(self) -> bytes:
        """Bytes that are ordered as the token ids are."""
        return _name(self.ids)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of caches and states."""
        return sum(cached.cache.nbytes for cached in self.caches) + sum(states.nbytes for states in self.states)

    def reach(self, common: int, owners: Sequence[object]) -> int:
        """Return how many tokens a row can begin with that has so many in common with these.

        They are as many, as far as owners of caches who need hidden states get all that they have not read.
        The last token that one has read is read again by the target, if its states are not known: they choose the next.
        """
        read = [max(0, min(common, _length(cache_of(owner, self.caches[1:]))) - 1) for owner in owners]
        return min([common, *(length for length in read if length < self.first)])

    def states_of(self, length: int) -> list[Tensor]:
        """Return a copy of the states that are known of the first tokens, in one tensor, if there are any."""
        known = length - self.first
        return [torch.cat([*self.states])[:known].clone()] if self.states and known > 0 else []

    def replaces(self, other: "Prefix") -> bool:
        """Whether what begins with another prefix can begin with this one, and with as much of every cache."""
        if self.key != other.key or self.caches[0].common(other.ids) < len(other.ids):
            return False
        mine, theirs = self.caches[1:], other.caches[1:]
        return all(_length(cache_of(cached.owner, mine)) >= len(cached.ids) for cached in theirs)

    def copy(self) -> "Prefix":
        """Return the same in caches of its own."""
        caches = [cached.copy() for cached in self.caches]
        return Prefix(self.key, caches, self.first, self.states_of(len(self.ids)))


class Found(NamedTuple):
    """A prefix, and how many of its tokens a text begins with; none and 0 if those are too few."""

    prefix: Prefix | None = None
    length: int = 0


class Prefixes:
    """Prefixes, the least recently used first; and by key, in the order of their ids.  Several threads may use them."""

    def __init__(self) -> None:
        self._used: dict[Prefix, None] = {}
        self._sorted: dict[object, list[Prefix]] = {}
        self._lock = Lock()

    def __iter__(self) -> Iterator[Prefix]:
        return iter([*self._used])

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._used

    def use(self, prefix: Prefix) -> None:
        """Take note that a prefix was of use."""
        with self._lock:
            if prefix in self._used:
                self._used[prefix] = self._used.pop(prefix)

    def add(self, prefix: Prefix) -> None:
        """Take in a prefix, the most recently used."""
        with self._lock:
            insort(self._sorted.setdefault(prefix.key, []), prefix, key=NAME)
            self._used[prefix] = None

    def remove(self, prefix: Prefix) -> None:
        """Drop a prefix, if it is still there."""
        with self._lock:
            if prefix not in self._used:
                return
            prefixes = self._sorted[prefix.key]
            del self._used[prefix], prefixes[prefixes.index(prefix, bisect_left(prefixes, prefix.name, key=NAME))]
            if not prefixes:
                del self._sorted[prefix.key]

    def longest(self, key: object, ids: np.ndarray, owners: Sequence[object] = ()) -> Found:
        """Return the prefix that a text can begin with most of, and how much, unless too little."""
        found = Found()
        with self._lock:
            for prefix, common in self._nearest(key, ids):
                if common <= max(LEAST - 1, found.length):
                    break
                if (length := prefix.reach(common, owners)) >= max(LEAST, found.length + 1):
                    found = Found(prefix, length)
        return found

    def replacing(self, read: Prefix) -> Prefix | None:
        """Return a prefix that replaces another one, if there is one."""
        with self._lock:
            longer = takewhile(lambda found: found[1] == len(read.ids), self._nearest(read.key, read.ids))
            return next((prefix for prefix, _ in longer if prefix.replaces(read)), None)

    def replaced(self, read: Prefix) -> list[Prefix]:
        """Return the prefixes that another one replaces: the text begins with all of their tokens."""
        found, ids = list[Prefix](), read.ids
        with self._lock:
            prefixes = self._sorted.get(read.key, [])
            index = bisect_right(prefixes, read.name, key=NAME)
            while index:
                prefix = prefixes[index - 1]
                common = prefix.caches[0].common(ids)
                if common < len(prefix.ids):  # so all between it and the text's first tokens are longer than these
                    ids = ids[:common]
                    index = bisect_right(prefixes, _name(ids), key=NAME)
                    continue
                index -= 1
                found += [prefix] if read.replaces(prefix) else []
        return found

    def _nearest(self, key: object, ids: np.ndarray) -> Iterator[tuple[Prefix, int]]:
        """Yield prefixes, and how many tokens they have in common with a text; those with most first."""
        prefixes = self._sorted.get(key, [])
        index = bisect_left(prefixes, _name(ids), key=NAME)
        numbers = range(index, len(prefixes)), range(index - 1, -1, -1)
        sides = [((prefixes[at], prefixes[at].caches[0].common(ids)) for at in side) for side in numbers]
        return merge(*sides, key=lambda found: -found[1])


def cache_of(owner: object, caches: Sequence[Cached]) -> Cached | None:
    """Return the first cache of an owner; None if there is none, or nobody owns it."""
    return next((cached for cached in caches if owner is not None and cached.owner is owner), None)


def _length(cached: Cached | None) -> int:
    """Return how many tokens were read."""
    return len(cached.ids) if cached else 0


def _name(ids: np.ndarray) -> bytes:
    """Return bytes that are ordered as token ids are: a beginning comes right before what begins with it."""
    return ids.astype(">i8").tobytes()
