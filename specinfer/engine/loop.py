"""The decode loop: draft, score, verify, commit.  This is the whole algorithm.

Knows: the order of things.  Does not know: how trees grow, how attention works, which rule is exact, text.
"""

from collections.abc import Iterator, Sequence

from specinfer.attention import TreeSession
from specinfer.drafts.base import Proposer
from specinfer.engine.sequence import Row
from specinfer.engine.target_view import target_views
from specinfer.engine.verify import Verifier
from specinfer.errors import TreeError
from specinfer.results import Step
from specinfer.tree import Forest, Policy


def decode(
    target: TreeSession,
    drafts: Sequence[Proposer],
    policy: Policy,
    verifier: Verifier,
    rows: Sequence[Row],
) -> Iterator[list[tuple[Row, Step]]]:
    """Decode rows to their ends, one target pass a step; yield what each active row emitted.

    Args:
        target: the target's session, holding every row's tokens but the last (its root).
        drafts: one session per draft, in the order of their ids.
        policy: how trees grow.
        verifier: the rule that is exact for the policy's trees.
        rows: the sequences, in the order of the sessions' rows.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers.
    """
    while rows:
        trees = propose(drafts, policy, rows)
        views = target_views(rows, trees, target.score(trees))
        verdicts = [verifier.verify(tree, view) for tree, view in zip(trees, views, strict=True)]
        # each row is cut at end of sequence, stop strings and max_new_tokens, before anything is committed
        steps = [
            row.advance(tree, verdict, view.probability)
            for row, tree, verdict, view in zip(rows, trees, verdicts, views, strict=True)
        ]
        states = target.commit([None if row.finished else (0, *s.path) for row, s in zip(rows, steps, strict=True)])
        for draft in drafts:
            draft.commit([None if row.finished else s.tokens for row, s in zip(rows, steps, strict=True)], states)
        yield list(zip(rows, steps, strict=True))
        rows = [row for row in rows if not row.finished]


def propose(drafts: Sequence[Proposer], policy: Policy, rows: Sequence[Row]) -> Forest:
    """Return one tree per row: the drafts' trees, merged, no deeper than what the row may still emit.

    Rows that are not confident of their last token get bare roots; drafts are not asked for those alone.

    Raises:
        TreeError: a draft's trees grow from other tokens than the rows' last ones.
    """
    depths = [row.remaining - 1 if row.confident else 0 for row in rows]
    roots = [row.ids[-1] for row in rows]
    if drafts and policy.max_nodes and max(depths):
        trees = Forest.merged([draft.propose(policy, max(depths)) for draft in drafts]).pruned(depths)
    else:
        trees = Forest(policy.kind, roots)
    fitted = Forest.of(policy.fit(trees))
    if fitted.roots != roots:
        raise TreeError(f"trees with roots {fitted.roots} were drafted for rows that end in {roots}")
    return fitted
