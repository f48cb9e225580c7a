"""The decode loop, which is the whole algorithm: propose, score, verify, commit.

    trees     propose    the drafts grow one token tree per row, below the row's last token
    logits    score      one pass of the target over all nodes of all trees
    verdicts  verify     per row, the accepted path through its tree and the bonus token after it
    caches    commit     the target and the drafts keep what was accepted and forget the rest of the trees

Rows leave as they end, and others may join between two steps.

Knows: the order of these steps.  Does not know: how trees grow, how attention works, which rule is exact, text.
"""

from collections.abc import Callable, Iterator, Sequence

from specinfer.attention import TreeSession
from specinfer.engine.draft import DraftSession
from specinfer.engine.sequence import Row
from specinfer.engine.target_view import target_views
from specinfer.engine.verify import Verifier
from specinfer.errors import TreeError
from specinfer.results import Step
from specinfer.tree import Forest, Policy


def decode(
    target: TreeSession,
    drafts: Sequence[DraftSession],
    policy: Policy,
    verifier: Verifier,
    rows: Sequence[Row],
    newcomers: Callable[[int], Sequence[Row]] = lambda active: (),
) -> Iterator[list[tuple[Row, Step]]]:
    """Decode rows to their ends, one target pass a step; yield what each active row emitted.

    Args:
        target: the target's session, which holds every row's tokens except the last one (its root).
        drafts: one session per draft, in the order of their ids.
        policy: how trees grow.
        verifier: the rule that is exact for the policy's trees.
        rows: the sequences, in the order of the sessions' rows.
        newcomers: takes the number of active rows, and returns rows that have joined the sessions after these.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers.
    """
    while rows:
        trees = propose(drafts, policy, rows)
        views = target_views(rows, trees, target.score(trees))
        verdicts = [verifier.verify(view.tree, view) for view in views]
        # each row's text is cut where it ends (end of sequence, stop string, max_new_tokens) before the commit
        emitted = [
            (view.row, view.row.advance(view.tree, verdict, view))
            for view, verdict in zip(views, verdicts, strict=True)
        ]
        states = target.commit([None if row.finished else (0, *step.path) for row, step in emitted])
        for draft in drafts:
            draft.commit([None if row.finished else step.tokens for row, step in emitted], states, views)
        yield emitted
        rows = [row for row in rows if not row.finished]
        rows += newcomers(len(rows))


def propose(drafts: Sequence[DraftSession], policy: Policy, rows: Sequence[Row]) -> Forest:
    """Return one tree per row: the drafts' trees, merged, and cut to the depth that the row may still emit.

    If no row may grow a tree, or the policy is idle, all get bare roots and the drafts are not asked.

    Raises:
        TreeError: a draft's trees grow from other tokens than the rows' last ones.
    """
    roots, depths = [row.ids[-1] for row in rows], [row.max_depth for row in rows]
    if drafts and policy.max_nodes and max(depths) and not policy.idle:
        trees = Forest.merged([draft.propose(policy, roots, max(depths)) for draft in drafts]).pruned(depths)
    else:
        trees = Forest(policy.kind, roots)
    fitted = policy.fit(trees)
    if fitted.roots != roots:
        raise TreeError(f"trees with roots {fitted.roots} were drafted for rows that end in {roots}")
    return fitted
