"""The decode loop, which is the whole algorithm: propose, score, verify, commit.

    trees     propose    the drafts grow one token tree per row, below the row's last token
    logits    score      one pass of the target over all nodes of all trees
    verdicts  verify     per row, the accepted path through its tree and the bonus token after it
    caches    commit     the target and the drafts keep what was accepted and forget the rest of the trees

Rows leave as they end, and others join between two steps: a `Schedule` says which rows a step has.

Knows: the order of these steps.  Does not know: how trees grow, how attention works, which rule is exact, text.
"""

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

from specinfer.engine.draft import DraftSession
from specinfer.engine.grammar_draft import with_grammar
from specinfer.engine.sequence import Row, target_views
from specinfer.engine.sessions import Sessions
from specinfer.engine.verify import Verifier
from specinfer.errors import TreeError
from specinfer.results import Step
from specinfer.tree import Forest, Policy

T_co = TypeVar("T_co", covariant=True)
Emitted = list[tuple[Row, Step]]  # per row of a step


class Schedule(Protocol[T_co]):
    """Which rows are decoded (`scheduler.Decoding`)."""

    def admit(self) -> Sequence[Row]:
        """Return the rows of the next step, in the order of the sessions' rows, which newcomers have joined."""

    def finish(self, emitted: Emitted) -> T_co:
        """Take note of what each row of a step emitted."""


def decode(schedule: Schedule[T_co], sessions: Sessions, verifier: Verifier) -> Generator[T_co]:
    """Decode rows until none is left, one target pass a step; yield what the schedule makes of each step.

    Args:
        schedule: of the rows.
        sessions: the target's, which holds every row's tokens except the last one (its root), and one per draft.
        verifier: the rule that is exact for the policy's trees.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers.
    """
    target, drafts = sessions.target, sessions.drafts
    while rows := schedule.admit():
        trees = propose(drafts, sessions.policy, rows)
        views = target_views(rows, trees, target.score(trees))
        # each row's text is cut where it ends (end of sequence, stop string, max_new_tokens) before the commit
        emitted = [(view.row, view.row.advance(verifier.verify, view)) for view in views]
        states = target.commit([None if row.finished else (0, *step.path) for row, step in emitted])
        committed = [None if row.finished else step.tokens for row, step in emitted]
        for draft in drafts:
            draft.commit(committed, states, views)
        yield schedule.finish(emitted)


def propose(drafts: Sequence[DraftSession], policy: Policy, rows: Sequence[Row]) -> Forest:
    """Return one tree per row: the drafts' trees, merged, and cut to the depth that the row may still emit.

    If no row may grow a tree, or the policy is idle, the drafts are not asked.  Rows with a grammar get what it forces.

    Raises:
        TreeError: a draft's trees grow from other tokens than the rows' last ones.
    """
    roots, depths = [row.ids[-1] for row in rows], [row.max_depth for row in rows]
    if drafts and policy.max_nodes and max(depths) and not policy.idle:
        trees = Forest.merged([draft.propose(policy, roots, max(depths)) for draft in drafts]).pruned(depths)
    else:
        trees = Forest(policy.kind, roots)
    if any(row.constraint for row in rows):
        trees = with_grammar(trees, rows, len(drafts), policy)
    fitted = policy.fit(trees)
    if fitted.roots != roots:
        raise TreeError(f"trees with roots {fitted.roots} were drafted for rows that end in {roots}")
    return fitted
