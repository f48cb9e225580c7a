"""A draft at work in a batch: which rows its context still holds, and what its proposals cost.

Knows: which rows a session can go on with, what their results say.  Does not know: models, how trees grow.

A draft often has a smaller context than its target.  A row that comes to its end there gets bare roots from then on,
and its result says so.  Rows whose prompts the target's pass reads beside the trees of others join after that pass.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from specinfer.common.tensors import concat
from specinfer.engine.draft import Clocked, Committed, DraftContext, DraftSession, Scored, States
from specinfer.engine.sequence import Row
from specinfer.tree import Forest, Policy


class Drafting(Clocked):
    """A draft's session for B rows, which leave it where its context ends, with a clock.

    Args:
        session: just opened.
        context: that it was opened with.
        name: of the draft, for notes.
        open: opens one for other rows, from the target's states before their roots.

    Attributes:
        proposing: seconds in its proposals (passes, look-ups, growing) without prefill.
        inside: per row, whether the session still has it.
        notes: per row, where its result's notes are.
        late: the last rows of the batch, if they join after the pass of this step, and states that were read of them.
    """

    def __init__(
        self,
        session: DraftSession,
        context: DraftContext,
        name: str,
        open: Callable[[Sequence[Row], States], "Drafting"],
    ) -> None:
        self.session, self.name, self.open, self.proposing = session, name, open, 0.0
        self.late: tuple[Sequence[Row], States] = (), ()
        self.inside = [True] * len(context.prompts)
        self.notes: list[list[str]] = list(context.notes) or [[] for _ in self.inside]
        self._let_go()

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return one tree per row, as the session grows them; bare roots for rows that have left."""
        started, bare = perf_counter() - self.prefill_seconds, Forest(policy.kind, roots)
        grown = self.session.propose(policy, self._of_inside(roots), max_depth) if any(self.inside) else bare
        self.proposing += perf_counter() - self.prefill_seconds - started
        if len(grown) == len(bare):
            return grown
        trees = iter(grown)
        return Forest.of([next(trees) if inside else tree for inside, tree in zip(self.inside, bare, strict=True)])

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take note of what each row committed; rows whose context has ended leave, and late ones join."""
        known, (late, read), self.late = len(self.inside), self.late, ((), ())
        if any(self.inside):
            self.session.commit(*(self._of_inside(values) for values in (tokens, states, scored)))
        kept = [row for row, new in enumerate(tokens[:known]) if new is not None]
        self.inside = [self.inside[row] for row in kept]
        self.notes = [self.notes[row] for row in kept]
        self._let_go()
        found = zip(late, read, states[known:], strict=True)
        joining = [(row, before, new) for row, before, new in found if not row.finished]
        if joining:
            rows, *parts = zip(*joining, strict=True)
            self.join(self.open(rows, [concat(states) for states in zip(*parts, strict=True)]))

    def join(self, other: Any) -> None:
        """Take in the rows of another session of the same draft, after the own ones."""
        if any(other.inside):
            self.session.join(other.session)
        self.inside, self.notes = self.inside + other.inside, self.notes + other.notes

    def _of_inside(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of rows that the session has, of one value for each row or of none."""
        return [value for value, inside in zip(values, self.inside, strict=False) if inside]

    def _let_go(self) -> None:
        """Let rows leave that the session cannot go on with."""
        rows = [row for row, inside in enumerate(self.inside) if inside]
        ended = [levels <= 0 for levels in self.session.levels_left()] if rows and self.session.limit else []
        if not any(ended):
            return
        self.session.commit([None if over else () for over in ended], [None] * len(rows))
        note = f"draft {self.name}: its context of {self.session.limit} tokens has ended, and it proposes nothing more"
        for row, over in zip(rows, ended, strict=True):
            self.inside[row] = not over
            if over:
                self.notes[row].append(note)
