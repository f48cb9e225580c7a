"""What the target has read is kept: a text that begins like another one copies that beginning and reads the rest.

Knows: token ids, the target's sessions and caches, how much memory is free.
Does not know: rows, how they are decoded, drafts, which read whole prompts: that costs little.

    text      what a row shares with others: its ids, and the salt that others must have
    prefix    tokens that were read: a row of a cache, and the hidden states of the same tokens if drafts need them

A row that leaves becomes a prefix of the store.  Rows under way, and beginnings that the rows of one batch share, are
found as well.  The longest common beginning counts, so a system prompt needs no prefix of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specinfer.attention import TreeCache, TreeModel, TreeSession
from specinfer.common.memory import free_bytes
from specinfer.common.tensors import concat
from specinfer.common.values import plain
from specinfer.errors import InputError

LEAST = 16  # tokens of a beginning; shorter ones are not worth a pass of their own
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


@dataclass(eq=False, repr=False)
class Prefix:
    """Tokens that were read.

    Attributes:
        key: of those that may share it.
        ids: (n,).
        cache, row: where their keys and values are.
        states: their auxiliary hidden states, (m, K, H) each and n in all; none without `TreeSession.aux_layers`.
    """

    key: tuple[object, ...]
    ids: np.ndarray
    cache: TreeCache
    row: int = 0
    states: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of cache and states."""
        return self.cache.nbytes + sum(states.nbytes for states in self.states)

    def common(self, ids: np.ndarray) -> int:
        """Return how many tokens, of (m,) ids, these ones begin with."""
        size = min(len(self.ids), len(ids))
        differ = self.ids[:size] != ids[:size]
        return int(differ.argmax()) if differ.any() else size

    def first_states(self, length: int) -> list[Tensor]:
        """Return a copy of the states of the first tokens, in one tensor, if there are states."""
        return [torch.cat([*self.states])[:length].clone()] if self.states else []

    def copy(self) -> "Prefix":
        """Return the same in a cache of its own."""
        length = len(self.ids)
        return Prefix(self.key, self.ids, self.cache.copy_of(self.row, length), 0, self.first_states(length))


Found = tuple[Prefix | None, int]  # a prefix, and how many of its tokens a text begins with; none: (None, 0)


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
        prefixes: the least recently used first.

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
        self.prefixes: list[Prefix] = []

    @property
    def nbytes(self) -> int:
        """Bytes that prefixes take."""
        return sum(prefix.nbytes for prefix in self.prefixes)

    def clear(self) -> None:
        """Forget everything."""
        self.prefixes = []

    def open(self, model: TreeModel, texts: Sequence[Text], *sizes: Any) -> TreeSession:
        """Open a session with a row for each text, as `TreeModel.session` does."""
        session = model.session(len(texts), *sizes)
        return session if model.stateful or self.megabytes == 0 else StoringSession(self, texts, session)

    def begin(self, session: TreeSession, beside: TreeSession | None = None) -> list[Tensor | None]:
        """Let each row of a new session begin with as much of its prompt as was read.

        What two of the rows share, and nobody has read, is read once.

        Args:
            session: of `open`.
            beside: another one, whose rows are under way.

        Returns:
            per row, the auxiliary hidden states of what it begins with; None without any.
        """
        if not isinstance(session, StoringSession):
            return [None] * len(session.cache.lengths)
        prompts = [np.array(text.prompt, np.int64) for text in session.texts]
        keys = [session.key(text) for text in session.texts]
        found = [*self.prefixes, *(beside.read() if isinstance(beside, StoringSession) else ())]
        for number, (text, key, ids) in enumerate(zip(session.texts, keys, prompts, strict=True)):
            known, length = _longest(found, key, ids)
            earlier = [Prefix(*pair, session.cache) for pair in zip(keys[:number], prompts, strict=False)]
            shared = _longest(earlier, key, ids)[1]
            if shared - length >= LEAST:
                found.append(session.beginning(text, ids[:shared], known, length))
                length = shared
            text.cached = length
        for row, (key, ids) in enumerate(zip(keys, prompts, strict=True)):
            prefix, length = _longest(found, key, ids)
            if prefix:
                session.begin(row, prefix, length)
                self._use(prefix)
        return [concat(states) for states in session.states]

    def release(self, session: TreeSession) -> None:
        """Keep what the rows of a session have read: it is not used any more."""
        if isinstance(session, StoringSession):
            for prefix in session.read():
                self.keep(prefix, session)

    def keep(self, read: Prefix, session: TreeSession) -> None:
        """Keep a copy of what a row has read, unless another prefix begins with it; drop those that it begins with.

        Args:
            read: in a cache of the session, which goes on.
            session: on the target.
        """
        length = len(read.ids)
        if length < LEAST or read.key[0] is None or not self.wanted():
            return
        common = [prefix.common(read.ids) if prefix.key == read.key else -1 for prefix in self.prefixes]
        if length in common:
            self._use(self.prefixes[common.index(length)])
            return
        pairs = zip(self.prefixes, common, strict=True)
        self.prefixes = [*(prefix for prefix, shared in pairs if shared < len(prefix.ids)), read.copy()]
        limit = inf if self.megabytes is None else self.megabytes * MEGABYTE
        if self.megabytes is None:
            free = free_bytes(session.device)
            limit = SHARE * (self.nbytes + (UNKNOWN if free == inf else free))
        # processes that share a model drop the same prefixes
        while self.prefixes and session.model.ranks.largest([self.nbytes - limit])[0] > 0:
            self.prefixes = self.prefixes[1:]

    def _use(self, prefix: Prefix) -> None:
        """Take note that a prefix was of use."""
        if prefix in self.prefixes:
            self.prefixes = [*(other for other in self.prefixes if other is not prefix), prefix]


class StoringSession(TreeSession):
    """A session of the target whose rows go into a store when they leave.

    Args:
        store: that opens it.
        texts: one per row.
        session: the same without a store, nothing was read yet.

    Attributes:
        states: per row, the auxiliary hidden states of all that is committed, in order.
    """

    def __init__(self, store: PrefixStore, texts: Sequence[Text], session: TreeSession) -> None:
        super().__init__(session.model, session.cache, session.aux_layers, session.run, session.repeated)
        self.store, self.texts = store, [*texts]
        self.states: list[list[Tensor]] = [[] for _ in texts]

    def key(self, text: Text) -> tuple[object, ...]:
        """Return what is equal for texts that may share what was read."""
        return text.salt, self.model.model, self.aux_layers, self.dtype

    def read(self) -> Iterator[Prefix]:
        """Return what each row has read, in the caches that it is in."""
        return map(self.prefix, range(len(self.texts)))

    def prefix(self, row: int) -> Prefix:
        """Return what one row has read."""
        text, length = self.texts[row], self.cache.lengths[row]
        if self.aux_layers:  # they differ if Ctrl-C came in between
            length = min(length, sum(map(len, self.states[row])))
        return Prefix(self.key(text), np.array(text.ids[:length], np.int64), self.cache, row, self.states[row])

    def begin(self, row: int, prefix: Prefix, length: int) -> None:
        """Let a row, of which nothing was read yet, begin with the first tokens of a prefix."""
        self.cache.begin(row, prefix.cache, prefix.row, length)
        self.states[row] += prefix.first_states(length)

    def beginning(self, text: Text, ids: np.ndarray, known: Prefix | None, length: int) -> Prefix:
        """Read the first tokens of a text, for other texts to begin with; the first ones are known."""
        session = StoringSession(self.store, [Text(ids.tolist(), text.salt)], self.fresh(1, len(ids)))
        if known:
            session.begin(0, known, length)
        session.prefill([ids[length:].tolist()])
        self.prefill_seconds += session.prefill_seconds
        return session.prefix(0)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """As `TreeSession.commit`; a row that leaves is kept up to its last root, if it is wanted."""
        found = super().commit([(0,) if path is None else path for path in paths])
        for states, new in zip(self.states, found, strict=True):
            states += [] if new is None else [new]
        if None not in paths:
            return found
        for row, path in enumerate(paths):
            if path is None:
                self.store.keep(self.prefix(row), self)
        self.cache.keep([None if path is None else () for path in paths])
        kept = [row for row, path in enumerate(paths) if path is not None]
        self.texts, self.states = [self.texts[row] for row in kept], [self.states[row] for row in kept]
        self.unread = [()] * len(kept)
        return [None if path is None else states for path, states in zip(paths, found, strict=True)]

    def join(self, other: TreeSession) -> None:
        """As `TreeSession.join`, of a session with the same store."""
        super().join(other)
        if isinstance(other, StoringSession):
            self.texts, self.states = self.texts + other.texts, self.states + other.states


def checked_salt(salt: object) -> str:
    """Return a salt, "" for None; raise `InputError` if it is no string."""
    if salt is not None and not isinstance(salt, str):
        raise InputError(f"cache_salt={salt!r:.60} is no string: give one that those who may share have in common")
    return salt or ""


def _longest(prefixes: Sequence[Prefix], key: object, ids: np.ndarray) -> Found:
    """Return the prefix that shares most with ids, the latest of several, and how much, unless that is too little."""
    found: Found = None, 0
    for prefix in prefixes:
        if prefix.key == key and (shared := prefix.common(ids)) >= max(LEAST, found[1]):
            found = prefix, shared
    return found
