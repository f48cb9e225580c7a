"""A draft's session for the rows that fit its context: others leave it, and the rest draft on.

Knows: which rows a session can go on with, what their results say.  Does not know: models, how trees grow.

A draft often has a smaller context than its target.  A row that comes to its end there gets bare roots from then on,
and its result says so.  Where a row still has some levels, its tree is cut to them by the session itself.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specinfer.engine.draft import Clocked, DraftContext, DraftSession, Scored
from specinfer.tree import Forest, Policy, TokenTree


def within_context(session: DraftSession, context: DraftContext, name: str) -> DraftSession:
    """Return a session that rows leave when its draft's context ends; itself if it has no end.

    Args:
        session: just opened.
        context: that it was opened with.
        name: of the draft, for notes.
    """
    return session if session.limit is None else RowsWithin(session, context, name)


class RowsWithin(Clocked):
    """A session of B rows, of which the first ones that fit are its own draft's.

    Attributes:
        roots: per row, its last committed token.
        inside: per row, whether the draft still has it.
        notes: per row, where its result's notes are.
    """

    def __init__(self, session: DraftSession, context: DraftContext, name: str) -> None:
        self.session, self.name = session, name
        self.roots = [prompt[-1] for prompt in context.prompts]
        self.inside = [True] * len(self.roots)
        self.notes: list[list[str]] = list(context.notes) or [[] for _ in self.roots]
        self._let_go()

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow one tree per row below its last committed token; bare roots for rows that have left."""
        if all(self.inside):
            return self.session.propose(policy, max_depth)
        trees = iter(self.session.propose(policy, max_depth) if any(self.inside) else ())
        bare = Forest(policy.kind, self.roots)
        return Forest.of([next(trees) if inside else bare[row] for row, inside in enumerate(self.inside)])

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Take note of what each row committed; rows whose context has ended leave."""
        if any(self.inside):
            self.session.commit(*(self._of_inside(values) for values in (tokens, states, scored)))
        kept = [row for row, new in enumerate(tokens) if new is not None]
        self.roots = [(tokens[row] or [self.roots[row]])[-1] for row in kept]
        self.inside = [self.inside[row] for row in kept]
        self.notes = [self.notes[row] for row in kept]
        self._let_go()

    def join(self, other: Any) -> None:
        """Take in the rows of another session of the same draft, after the own ones."""
        if any(other.inside):
            self.session.join(other.session)
        for name in ("roots", "inside", "notes"):
            setattr(self, name, [*getattr(self, name), *getattr(other, name)])

    def _of_inside(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of rows that the draft has, of one value for each row or of none."""
        return [value for value, inside in zip(values, self.inside, strict=False) if inside]

    def _let_go(self) -> None:
        """Let rows leave that the draft cannot go on with."""
        rows = [row for row, inside in enumerate(self.inside) if inside]
        ended = [levels <= 0 for levels in self.session.levels_left()] if rows else []
        if not any(ended):
            return
        self.session.commit([None if over else () for over in ended], [None] * len(rows))
        note = f"draft {self.name}: its context of {self.session.limit} tokens has ended, and it proposes nothing more"
        for row, over in zip(rows, ended, strict=True):
            self.inside[row] = not over
            if over:
                self.notes[row].append(note)
