"""The grammar as a draft: trees of constrained rows lose what it forbids and gain what it forces.

A forced token is certain once its parent is right, so its score is its parent's, whether a draft proposed it or not.
Scores below it rise with it.  Trees of draws stay as they were drawn: what is illegal there has no chance anyway.

Knows: trees, constraints.  Does not know: how grammars are followed, how trees are cut to a budget.
"""

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from specinfer.engine.constraint import Constraint
from specinfer.engine.sequence import Row
from specinfer.errors import SamplingError
from specinfer.tree import Draw, Forest, Kind, TokenTree

NAME = "grammar"  # in results


class Node(NamedTuple):
    """A node of a tree that is being made; the parent is a number among them."""

    token: int
    parent: int
    score: float
    draws: Sequence[Draw]


def with_forced(trees: Forest, rows: Sequence[Row], draft: int, most: int) -> Forest:
    """Return the trees of a step with what the rows' grammars forbid left out, and what they force added.

    Args:
        trees: of the rows.
        rows: with a grammar or without.
        draft: the grammar's id in trees.
        most: forced tokens of a row; of as many levels as it may still emit.
    """
    if trees.kind is not Kind.RANKED or not any(row.constraint for row in rows):
        return trees
    found = list(trees)
    for number, row in enumerate(rows):
        if row.constraint and row.max_depth > 0 and most:
            started = perf_counter()
            with suppress(SamplingError):  # the target's scores after the root tell
                found[number] = _with_forced(found[number], row, row.constraint, Draw(draft, 0), most)
            row.constraint.seconds += perf_counter() - started
    return Forest.of(found)


def _with_forced(tree: TokenTree, row: Row, rule: Constraint, drawn: Draw, most: int) -> TokenTree:
    """Return a row's tree with what its grammar forces, `most` tokens at most, and without what it forbids."""
    tokens, depths, scores = tree.tokens.tolist(), tree.depths.tolist(), tree.scores.tolist()
    nodes, numbers = [Node(tokens[0], -1, 0.0, ())], {0: 0}  # of the new tree, and in it of the nodes that are kept
    for node, depth in enumerate(depths):  # a parent comes before its children
        if node not in numbers or depth >= row.max_depth:
            continue
        path, above, children = [*row.ids, *tree.path(node)], numbers[node], tree.children(node)
        forced = rule.forced(path)[: row.max_depth - depth]
        allowed = rule.allowed(path) if children and not forced else None
        for child in children:
            token, score, draws = tokens[child], nodes[above].score, tree.draws[child]
            if forced[:1] == [token]:
                draws = (*draws, drawn)
            elif allowed is not None and allowed[token]:
                score += scores[child] - scores[node]
            else:
                continue
            numbers[child] = len(nodes)
            nodes.append(Node(token, above, score, draws))
        if nodes[-1].parent != above:  # no child is kept
            for token in forced[:most]:
                nodes.append(Node(token, above, nodes[above].score, (drawn,)))
                above = len(nodes) - 1
            most -= len(forced[:most])
    columns: list[Any] = [list(column) for column in zip(*nodes, strict=True)]
    return TokenTree.from_nodes(tokens[0], *(column[1:] for column in columns))
