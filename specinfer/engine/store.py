"""What was read is kept: a text that begins like another one copies that beginning and reads the rest.

Knows: token ids, sessions of models and their caches, how much memory is free.
Does not know: rows, how they are decoded, how drafts read.

    text      what a row shares with others: its ids, and the salt that others must have
    prefix    tokens that the target has read, and what drafts have read of them; the target's hidden states of those
              that a draft which needs them has not read yet

A row that leaves becomes a prefix of the store.  Rows under way, and beginnings that the rows of one batch share, are
found as well.  The longest common beginning counts, so a system prompt needs no prefix of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from specinfer.attention import TreeModel, TreeSession
from specinfer.common.memory import free_bytes
from specinfer.common.tensors import concat
from specinfer.common.values import plain
from specinfer.engine.prefixes import LEAST, Cached, Found, Prefix, Prefixes
from specinfer.errors import InputError

STEPS = 32  # after which states that no draft needs any more are dropped
MEGABYTE = 10**6
SHARE = 0.25  # of the memory that is free, or taken by prefixes already
UNKNOWN = 8e9  # bytes that are taken for free where the system does not say


@dataclass(eq=False)
class Text:
    """What a store knows of a row.

    Attributes:
        ids: the prompt's, and those that follow as they come.
        salt: only texts with the same one share what was read; None: nothing more is kept of this one.
        cached: tokens of the prompt that were copied, not read.
    """

    ids: Sequence[int]
    salt: str | None = ""
    cached: int = 0

    @property
    def prompt(self) -> Sequence[int]:
        """What is read before the first step: all but the last token, the root."""
        return self.ids[:-1]


class Beginning(NamedTuple):
    """What a row begins with: the target's auxiliary hidden states that are known of it, and what drafts have read."""

    states: Tensor | None
    caches: Sequence[Cached]


class Reads(Protocol):
    """A draft's session, beside a target's with the same rows."""

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what it has read of a row with these ids; None: nothing that it could begin another one with."""

    def needs(self, row: int, ids: Sequence[int]) -> int:
        """Return the first token of a row whose states it has not read."""


Owners = Sequence[tuple[object, float]]  # who needs hidden states, and how many tokens its context has


class PrefixStore:
    """What was read, as long as there is memory for it; the least recently used is dropped first.

    Give the same one to all that may share: the turns of a conversation, the batches of a server.  It holds for the
    weights as they are: `clear` it after a change.  What models that keep states have read cannot be cut, so they read
    every prompt whole.

    Args:
        megabytes: that prefixes may take, of 10**6 bytes; 0 turns all sharing off.  None: a quarter of the memory that
            is free on the target's device, or that prefixes take already.
        wanted: whether rows that leave now are kept; by default all are.

    Attributes:
        prefixes: what it holds, the least recently used first.

    Raises:
        InputError: no number, or a negative one.
    """

    def __init__(self, megabytes: float | None = None, wanted: Callable[[], bool] = lambda: True) -> None:
        size = plain(megabytes)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or not size >= 0):
            raise InputError(
                f"megabytes={megabytes!r:.60}: give the memory that prefixes may take, 0 for none, or None"
            )
        self.megabytes, self.wanted = size, wanted
        self.prefixes = Prefixes()

    @property
    def nbytes(self) -> int:
        """Bytes that prefixes take."""
        return sum(prefix.nbytes for prefix in self.prefixes)

    def clear(self) -> None:
        """Forget everything."""
        self.prefixes = Prefixes()

    @property
    def keeps(self) -> bool:
        """Whether rows that leave now are kept."""
        return self.megabytes != 0 and self.wanted()

    def open(self, model: TreeModel, texts: Sequence[Text], *sizes: Any, owners: Owners = ()) -> TreeSession:
        """Open a session with a row for each text, as `TreeModel.session` does.

        Args:
            model: the target.
            texts: of the rows.
            *sizes: as `TreeModel.session`.
            owners: of caches, who need hidden states of all that they have not read; None can own none.
        """
        session = model.session(len(texts), *sizes)
        return session if model.stateful or self.megabytes == 0 else StoringSession(self, texts, session, owners)

    def begin(self, session: TreeSession, beside: TreeSession | None = None) -> list[Beginning]:
        """Let each row of a new session begin with as much of its prompt as was read.

        What two of the rows share, and nobody has read, is read once.

        Args:
            session: of `open`.
            beside: another one, whose rows are under way.

        Returns:
            per row, what it begins with.
        """
        if not isinstance(session, StoringSession):
            return [Beginning(None, ())] * len(session.cache.lengths)
        rows = [(row.text, session.key(row.text), np.array(row.text.prompt, np.int64)) for row in session.rows]
        found, earlier = Prefixes(), Prefixes()  # beside those of the store
        for read in beside.read() if isinstance(beside, StoringSession) else ():
            found.add(read)

        def longest(text: Text, key: tuple[object, ...], ids: np.ndarray) -> Found:
            owners = session.needing(text)
            return max((each.longest(key, ids, owners) for each in (self.prefixes, found)), key=lambda it: it.length)

        for text, key, ids in rows:
            known, length = longest(text, key, ids)
            shared = earlier.longest(key, ids).length
            if shared - length >= LEAST:
                found.add(session.beginning(text, ids[:shared], known, length))
                length = shared
            text.cached = length
            earlier.add(Prefix(key, [Cached(ids, session.cache)]))
        for row, each in enumerate(rows):
            prefix, length = longest(*each)
            if prefix:
                session.begin(row, prefix, length)
                self.prefixes.use(prefix)
        return [Beginning(concat(row.states), row.caches) for row in session.rows]

    def release(self, session: TreeSession) -> None:
        """Keep what the rows of a session have read: it is not used any more."""
        if isinstance(session, StoringSession):
            for prefix in session.read():
                self.keep(prefix, session)

    def keep(self, read: Prefix, session: TreeSession) -> None:
        """Keep a copy of what a row has read, unless another prefix replaces it; drop those that it replaces.

        Args:
            read: in a cache of the session, which goes on.
            session: on the target.
        """
        if len(read.ids) < LEAST or read.key[0] is None or not self.keeps:
            return
        if known := self.prefixes.replacing(read):
            self.prefixes.use(known)
            return
        for replaced in self.prefixes.replaced(read):
            self.prefixes.remove(replaced)
        self.prefixes.add(read.copy())
        limit = inf if self.megabytes is None else self.megabytes * MEGABYTE
        if self.megabytes is None:
            free = free_bytes(session.device)
            limit = SHARE * (self.nbytes + (UNKNOWN if free == inf else free))
        # processes that share a model drop the same prefixes
        for oldest in self.prefixes:
            if session.model.ranks.largest([self.nbytes - limit])[0] <= 0:
                break
            self.prefixes.remove(oldest)


@dataclass(eq=False, repr=False)
class Followed:
    """A row of a session whose rows are kept.

    Attributes:
        text: what the store knows of it.
        first: the first token whose auxiliary hidden states are held.
        states: they, in order.
        caches: that drafts begin with, until they have opened a session for the row.
    """

    text: Text
    first: int = 0
    states: list[Tensor] = field(default_factory=list)
    caches: Sequence[Cached] = ()

    def forget(self, count: int) -> None:
        """Forget the states of the first `count` tokens, as far as whole steps are among them."""
        while self.states and self.first + len(self.states[0]) <= count:
            self.first += len(self.states.pop(0))


class StoringSession(TreeSession):
    """A session of the target whose rows go into a store when they leave.

    Args:
        store: that opens it.
        texts: one per row.
        session: the same without a store, nothing was read yet.
        owners: as `PrefixStore.open`.

    Attributes:
        rows: what is known of each.
        types: of the weights, and the one that autocast computes in, if it does: keys and values are of the latter.
        drafts: sessions beside this one, whose caches are kept with the target's.
        steps: the states of committed tokens, per row, by step, that the rows do not hold yet.
    """

    def __init__(self, store: PrefixStore, texts: Sequence[Text], session: TreeSession, owners: Owners) -> None:
        super().__init__(session.model, session.cache, session.aux_layers, session.run, session.repeated)
        self.store, self.owners, self.types = store, owners, (self.dtype, self.model.autocast)
        self.forgets = bool(self.aux_layers) and all(owner is not None for owner, _ in owners)
        self.rows = [Followed(text) for text in texts]
        self.drafts: Sequence[Reads] = ()
        self.steps: list[Sequence[Tensor | None]] = []

    def key(self, text: Text) -> tuple[object, ...]:
        """Return what is equal for texts that may share what was read."""
        owners = tuple(owner for owner, _ in self.owners)
        return text.salt, self.model.model, self.aux_layers, self.types, owners

    def needing(self, text: Text) -> list[object]:
        """Return the owners who need hidden states of a text: it fits into their contexts."""
        return [owner for owner, limit in self.owners if len(text.ids) < limit]

    def read(self) -> Iterator[Prefix]:
        """Return what each row has read, in the caches that it is in."""
        return map(self.prefix, range(len(self.rows)))

    def prefix(self, number: int) -> Prefix:
        """Return what one row has read."""
        self._settle()
        row, length = self.rows[number], self.cache.lengths[number]
        ids = row.text.ids
        if self.aux_layers:  # they differ if Ctrl-C came in between
            length = min(length, row.first + sum(map(len, row.states)))
        found = [draft.read(number, ids) for draft in self.drafts] or row.caches
        target = Cached(np.array(ids[:length], np.int64), self.cache, number, self.model.model)
        return Prefix(self.key(row.text), [target, *filter(None, found)], row.first, row.states)

    def begin(self, number: int, prefix: Prefix, length: int) -> None:
        """Let a row, of which nothing was read yet, begin with the first tokens of a prefix."""
        row, (target, *others) = self.rows[number], prefix.caches
        self.cache.begin(number, target.cache, target.row, length)
        row.first, row.states = min(prefix.first, length), prefix.states_of(length)
        # caches of the store stay as they are, others may have changed before drafts begin with them
        row.caches = others if prefix in self.store.prefixes else [cached.copy() for cached in others]

    def beginning(self, text: Text, ids: np.ndarray, known: Prefix | None, length: int) -> Prefix:
        """Read the first tokens of a text, for other texts to begin with; the first ones are known."""
        session = StoringSession(self.store, [Text(ids.tolist(), text.salt)], self.fresh(1, len(ids)), self.owners)
        if known:
            session.begin(0, known, length)
        session.prefill([ids[length:].tolist()])
        self.prefill_seconds += session.prefill_seconds
        return session.prefix(0)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> Sequence[Tensor | None]:
        """As `TreeSession.commit`; a row that leaves is kept up to its last root, if it is wanted."""
        found = super().commit([(0,) if path is None else path for path in paths])
        self.steps.append(found)
        if len(self.steps) == STEPS:
            self._settle()
            self._forget(range(len(paths)))
        if None not in paths:
            return found
        leaving = [number for number, path in enumerate(paths) if path is None]
        self._settle()
        self._forget(leaving)
        for number in leaving:
            self.store.keep(self.prefix(number), self)
        rows, self.rows = self.rows, []  # if Ctrl-C comes while they move, nothing is kept of them
        self.cache.keep([None if path is None else () for path in paths])
        self.rows = [row for row, path in zip(rows, paths, strict=True) if path is not None]
        self.unread = [()] * len(self.rows)
        return [None if path is None else states for path, states in zip(paths, found, strict=True)]

    def _settle(self) -> None:
        """Let rows hold the states of their committed tokens."""
        steps, self.steps = self.steps, []
        for step in steps:
            for row, new in zip(self.rows, step, strict=True):
                row.states += [] if new is None else [new]

    def _forget(self, numbers: Iterable[int]) -> None:
        """Let rows forget the states that no draft needs any more."""
        for number in numbers if self.drafts and self.forgets else ():
            row = self.rows[number]
            row.forget(min(draft.needs(number, row.text.ids) for draft in self.drafts))

    def join(self, other: TreeSession) -> None:
        """As `TreeSession.join`, of a session with the same store, whose rows drafts have taken in."""
        self._settle()
        super().join(other)
        if isinstance(other, StoringSession):
            other._settle()
            self.follow(self.drafts, other.rows)

    def follow(self, drafts: Sequence[Reads], rows: Sequence[Followed] = ()) -> None:
        """Keep what drafts read beside the target; they have taken the caches that rows, and others, begin with."""
        self.drafts, self.rows = drafts, [*self.rows, *rows]
        for row in self.rows:
            row.caches = ()


def checked_salt(salt: object) -> str:
    """Return a salt, "" for None; raise `InputError` if it is no string."""
    if salt is not None and not isinstance(salt, str):
        raise InputError(f"cache_salt={salt!r:.60} is not a string: give one that all who may share have in common")
    return salt or ""
