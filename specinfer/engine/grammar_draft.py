"""The grammar as a draft: trees of constrained rows lose what it forbids, gain what it forces, and what it suggests.

A forced token is certain once its parent is right, so its score is its parent's, whether a draft proposed it or not.
Scores below it rise with it.  Where few tokens are legal, as in white space, the legal ones that followed the same
token before may come next, with the probabilities that `followers` gives them; what is forced goes on below.
Trees of draws stay as they were drawn: what is illegal there has no chance anyway.

Knows: trees, constraints.  Does not know: how grammars are followed, how trees are cut to a budget.
"""

from collections.abc import Sequence
from contextlib import suppress
from heapq import heappop, heappush
from math import inf, log
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from specinfer.engine.constraint import Constraint
from specinfer.engine.sequence import Row
from specinfer.errors import SamplingError
from specinfer.grammar.matcher import Mask
from specinfer.tree import Draw, Forest, Kind, Policy, TokenTree

NAME = "grammar"  # in results
FEW = 256  # legal tokens, at most, where the grammar suggests some: the rest of a text is the other drafts'


class Node(NamedTuple):
    """A node of a tree that is being made; the parent is a number among them."""

    token: int
    parent: int
    score: float
    draws: Sequence[Draw]


class Waiting(NamedTuple):
    """A node that may become one of a tree: the best score first, and of equal ones the first that was found."""

    rank: float  # minus its score
    number: int  # in the order in which they were found
    node: Node
    drafted: int  # its number in the drafts' tree; -1: it is the grammar's alone
    forced: Sequence[int]  # tokens that must follow it, if some are known


def with_grammar(trees: Forest, rows: Sequence[Row], draft: int, policy: Policy) -> Forest:
    """Return a step's trees without what the rows' grammars forbid, and with what they force and suggest.

    Args:
        trees: of the rows.
        rows: with a grammar or without.
        draft: the grammar's id in trees.
        policy: of the trees; its `max_nodes` is how many nodes of a row may be the grammar's alone.
    """
    if trees.kind is not Kind.RANKED:
        return trees
    found = list(trees)
    for number, row in enumerate(rows):
        if row.constraint and row.max_depth > 0 and policy.max_nodes:
            started = perf_counter()
            row.constraint.followers.extend(row.ids)
            with suppress(SamplingError):  # the target's scores after the root tell
                found[number] = _Growing(found[number], row, row.constraint, Draw(draft, 0), policy).tree()
            row.constraint.seconds += perf_counter() - started
    return Forest.of(found)


class _Growing:
    """A row's tree, which grows best first: all that is legal of the drafts' tree, and some nodes more."""

    def __init__(self, drafted: TokenTree, row: Row, rule: Constraint, drawn: Draw, policy: Policy) -> None:
        self.drafted, self.row, self.rule, self.drawn = drafted, row, rule, drawn
        self.branches, self.left = policy.branches, policy.max_nodes  # nodes of the grammar's alone
        self.least = log(policy.min_probability) if policy.min_probability else -inf
        self.tokens, self.scores = drafted.tokens.tolist(), drafted.scores.tolist()
        self.nodes: list[Node] = []
        self.paths: list[list[int]] = []  # of the nodes
        self.waiting: list[Waiting] = []
        self.found = 0

    def tree(self) -> TokenTree:
        """Return the tree, grown."""
        self._wait(Node(self.tokens[0], -1, 0.0, ()), 0)
        while self.waiting:
            _, _, node, drafted, forced = heappop(self.waiting)
            if drafted < 0 and not self.left:
                continue
            self.left -= drafted < 0
            self.nodes.append(node)
            self.paths.append([*self.paths[node.parent], node.token] if node.parent >= 0 else list(self.row.ids))
            if len(self.paths[-1]) - len(self.row.ids) < self.row.max_depth:
                self._below(len(self.nodes) - 1, drafted, forced)
        columns: list[Any] = [list(column) for column in zip(*self.nodes, strict=True)]
        return TokenTree.from_nodes(self.tokens[0], *(column[1:] for column in columns))

    def _below(self, number: int, drafted: int, forced: Sequence[int]) -> None:
        """Find what may stand below a node."""
        path, above = self.paths[number], self.nodes[number].score
        children = {self.tokens[child]: child for child in self.drafted.children(drafted)} if drafted >= 0 else {}
        if not children and not self.left:
            return
        forced = forced or self.rule.forced(path)
        allowed = None if forced else self.rule.allowed(path)
        legal = forced[:1] if allowed is None else [token for token in children if allowed[token]]
        children = {token: child for token, child in children.items() if token in legal}
        chances = dict.fromkeys(forced[:1], 0.0)
        if allowed is not None and (self.branches or not children):
            chances = self._suggested(path, allowed)
        for token in {**children, **chances}:
            score, draws = chances.get(token, -inf), (self.drawn,) if token in chances else ()
            if (child := children.get(token, -1)) >= 0:
                score = max(score, self.scores[child] - self.scores[drafted])
                draws = (*self.drafted.draws[child], *draws)
            if child >= 0 or above + score >= self.least:
                self._wait(Node(token, number, above + score, draws), child, forced[1:])

    def _suggested(self, path: Sequence[int], allowed: Mask) -> dict[int, float]:
        """Return log-probabilities of tokens that may follow ids: of the likeliest alone if trees do not branch."""
        chances = self.rule.followers.chances(path[-1], allowed) if np.count_nonzero(allowed) <= FEW else {}
        ranks = {token: log(chance) for token, chance in chances.items()}
        return ranks if self.branches or not ranks else dict([max(ranks.items(), key=itemgetter(1))])

    def _wait(self, node: Node, drafted: int, forced: Sequence[int] = ()) -> None:
        heappush(self.waiting, Waiting(-node.score, self.found, node, drafted, forced))
        self.found += 1
