"""The token tree: what a draft proposes and one pass of the target scores.

This module knows token ids, log-probabilities and who drew what.  It knows no models, no text and no tensors:
a tree is host data (numpy), made once per decode step from a few hundred bytes, and never changed afterwards.

    root    node 0, the last committed token; everything below it was drafted
    score   log-probability of the whole path from the root, under the draft: 0 at the root
    draw    one act of drafting a token under a parent; a token drawn twice there is one node with two draws
    law     the distribution q that a parent's children were drawn from: exact verification needs it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import exp, inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specinfer.errors import TreeError
from specinfer.shown import Shown

from .render import render

if TYPE_CHECKING:
    import networkx

SLACK = 1e-6  # how far rounding may lift a child's score above its parent's


class Draw(NamedTuple):
    """One draw that produced a node."""

    draft: int  # which draft drew it
    order: int  # its place among that draft's draws under the same parent: 0, 1, ...


class Kind(StrEnum):
    """How children were chosen.  A verifier is exact for certain kinds only."""

    RANKED = "ranked"  # deterministic given the distributions: top-k, best-first
    IID = "iid"  # drawn independently from q, with replacement
    WITHOUT_REPLACEMENT = "without-replacement"  # drawn from q, renormalised after each draw


@dataclass(frozen=True, eq=False, repr=False)
class TokenTree(Shown):
    """An immutable token tree of N nodes in depth-first pre-order; siblings by score descending, then id.

    The order is canonical: two trees with the same nodes are equal array by array.  Use `from_nodes` to build
    one from nodes in any order.

    Raises:
        TreeError: an invariant is violated; the message names the node.
    """

    tokens: np.ndarray  # (N,) int64
    parents: np.ndarray  # (N,) int64, parents[0] = -1, parents[i] < i
    scores: np.ndarray  # (N,) float64, log-probability of the path, natural logarithm
    draws: tuple[tuple[Draw, ...], ...]  # per node, sorted; () at the root
    # (parent, draft) -> (V,) float64, the law q its children were drawn from.  A ranked tree has none; a
    # sampled one has one for each (parent, draft) in `draws`, or none when it is a record (`without_laws`).
    laws: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    kind: Kind = Kind.RANKED
    depths: np.ndarray = field(init=False)  # (N,) int64, 0 at the root
    _families: list[dict[int, int]] = field(init=False)  # node -> {token: child}, in sibling order

    def __post_init__(self) -> None:
        own = object.__setattr__  # the class is frozen for everyone else
        own(self, "tokens", np.array(self.tokens, np.int64))
        own(self, "parents", np.array(self.parents, np.int64))
        own(self, "scores", np.array(self.scores, np.float64))
        own(self, "draws", tuple(self.draws))
        own(self, "laws", {key: np.asarray(law, np.float64).view() for key, law in self.laws.items()})
        own(self, "kind", Kind(self.kind))
        depths, families = _checked_shape(self)
        own(self, "depths", np.array(depths, np.int64))
        own(self, "_families", families)
        _check_draws(families, self.draws)
        _check_laws(self)
        for array in (self.tokens, self.parents, self.scores, self.depths, *self.laws.values()):
            array.flags.writeable = False

    @classmethod
    def root_only(cls, token: int, kind: Kind = Kind.RANKED) -> TokenTree:
        """Return the tree that drafts nothing."""
        return cls(np.array([token]), np.array([-1]), np.zeros(1), ((),), {}, kind)

    @classmethod
    def from_nodes(
        cls,
        root: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        draws: Sequence[Sequence[Draw]],
        laws: Mapping[tuple[int, int], np.ndarray] | None = None,
        kind: Kind = Kind.RANKED,
    ) -> TokenTree:
        """Build the tree from drafted nodes in any order; nodes with the same path become one.

        Args:
            root: the last committed token.
            tokens: of the drafted nodes, root excluded.
            parents: indices into `tokens`; -1 is the root.
            scores: of nodes that become one, the largest counts.
            draws: at least one per node.  For each parent and draft they are renumbered 0, 1, ... in given
                order; where several listed parents became one, the draws under the first of them come first.
            laws: by (index into `tokens` or -1, draft); equal paths have equal laws, and the first is kept.
            kind: how the children were chosen.

        Raises:
            TreeError: a node has no draw, or cannot be reached from the root; or as the constructor.
        """
        nodes, place = _in_pre_order(root, tokens, parents, scores, draws)
        kept: dict[tuple[int, int], np.ndarray] = {}
        for (parent, draft), law in (laws or {}).items():
            kept.setdefault((place[parent], draft), law)
        return cls(
            np.array([node.token for node in nodes]),
            np.array([node.parent for node in nodes]),
            np.array([node.score for node in nodes]),
            tuple(tuple(node.draws) for node in nodes),
            kept,
            kind,
        )

    def __len__(self) -> int:
        """Return the number of nodes, root included."""
        return len(self._families)

    @property
    def num_drafted(self) -> int:
        """The number of nodes, root excluded."""
        return len(self) - 1

    @property
    def depth(self) -> int:
        """The depth of the deepest node; 0 when nothing was drafted."""
        return int(self.depths.max())

    def children(self, node: int) -> list[int]:
        """Return the children of a node in sibling order."""
        return list(self._families[node].values())

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that holds `token`, or None."""
        return self._families[node].get(token)

    def ancestors(self, node: int) -> list[int]:
        """Return the nodes from the root (first) to `node` itself (last)."""
        line = [node]
        while line[-1] > 0:
            line.append(int(self.parents[line[-1]]))
        return line[::-1]

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root to `node`."""
        return self.tokens[self.ancestors(node)[1:]].tolist()

    def paths(self) -> list[list[int]]:
        """Return `path` of every leaf, in node order; [[]] when nothing was drafted."""
        return [self.path(node) for node, family in enumerate(self._families) if not family]

    def ancestor_mask(self) -> np.ndarray:
        """Return the (N, N) bool mask: [i, j] is true where j is i or an ancestor of i."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def draws_under(self, node: int) -> list[tuple[Draw, int]]:
        """Return every draw made under a node with the child it produced, by draft, then in drawing order."""
        return sorted((draw, child) for child in self.children(node) for draw in self.draws[child])

    def pruned(self, max_depth: int) -> TokenTree:
        """Return the tree without the nodes deeper than `max_depth`.

        A sampled tree keeps its law exact: a depth is known before any token is drawn.
        """
        keep = np.flatnonzero(self.depths <= max(max_depth, 0))
        place = {int(old): new for new, old in enumerate(keep)}
        parents = [-1, *(place[p] for p in self.parents[keep[1:]].tolist())]
        laws = {(place[p], d): q for (p, d), q in self.laws.items() if self.depths[p] < max_depth}
        draws = tuple(self.draws[i] for i in keep)
        return TokenTree(self.tokens[keep], np.array(parents), self.scores[keep], draws, laws, self.kind)

    def best(self, count: int, worth: np.ndarray) -> TokenTree:
        """Return the tree of the `count` drafted nodes that are worth most, and of no others.

        Args:
            count: drafted nodes at most.
            worth: (N,) of each node; one that exceeds its parent's counts as its parent's, so ancestors are kept.
                Equals are kept in node order.

        Raises:
            TreeError: a sampled tree; choosing among drawn tokens biases verification.
        """
        if self.num_drafted <= count:
            return self
        if self.kind is not Kind.RANKED:
            raise TreeError(f"a {self.kind} tree must be verified whole: choosing among drawn nodes biases the output")
        values, parents = np.asarray(worth, np.float64).tolist(), self.parents.tolist()
        for node in range(1, len(self)):
            values[node] = min(values[node], values[parents[node]])
        keep = [0, *sorted(sorted(range(1, len(self)), key=lambda node: -values[node])[:count])]
        place = {node: i for i, node in enumerate(keep)}
        kept = [-1, *(place[parents[node]] for node in keep[1:])]
        return TokenTree(self.tokens[keep], np.array(kept), self.scores[keep], _renumbered(kept, self.draws, keep))

    @cached_property
    def proposers(self) -> list[int]:
        """Per node, as a bit mask, the drafts that drew it: bit d for draft d, 0 at the root."""
        return [sum(1 << draft for draft in {draw.draft for draw in draws}) for draws in self.draws]

    def without_laws(self) -> TokenTree:
        """Return the tree as a light record, which no verifier that needs laws can use any more."""
        return TokenTree(self.tokens, self.parents, self.scores, self.draws, {}, self.kind)

    def to_networkx(self) -> networkx.DiGraph:
        """Return a directed graph: nodes carry token, score, depth and draws, edges the probability."""
        import networkx

        graph = networkx.DiGraph(kind=str(self.kind))
        columns = zip(self.tokens.tolist(), self.scores.tolist(), self.depths.tolist(), self.draws, strict=True)
        for node, (token, score, depth, draws) in enumerate(columns):
            graph.add_node(node, token=token, score=score, depth=depth, draws=draws)
        for node in range(1, len(self)):
            graph.add_edge(int(self.parents[node]), node, probability=self.probability(node))
        return graph

    def probability(self, node: int) -> float:
        """Return the draft's probability of a node given its parent; 1 at the root."""
        if node == 0:
            return 1.0
        return min(1.0, exp(self.scores[node] - self.scores[self.parents[node]]))

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as lists for JSON, from which `from_dict` makes an equal tree."""
        return {
            "kind": str(self.kind),
            "tokens": self.tokens.tolist(),
            "parents": self.parents.tolist(),
            "scores": self.scores.tolist(),
            "draws": [[list(draw) for draw in draws] for draws in self.draws],
            "laws": [{"parent": p, "draft": d, "law": q.tolist()} for (p, d), q in sorted(self.laws.items())],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TokenTree:
        """Build the tree that `to_dict` described.  Raises TreeError as the constructor does."""
        draws = tuple(tuple(Draw(*draw) for draw in node) for node in data["draws"])
        laws = {(item["parent"], item["draft"]): np.array(item["law"]) for item in data["laws"]}
        return cls(data["tokens"], data["parents"], data["scores"], draws, laws, Kind(data["kind"]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return (
            self.kind == other.kind
            and self.draws == other.draws
            and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in ("tokens", "parents", "scores"))
            and self.laws.keys() == other.laws.keys()
            and all(np.array_equal(law, other.laws[key]) for key, law in self.laws.items())
        )

    def __repr__(self) -> str:
        return f"TokenTree(num_drafted={self.num_drafted}, depth={self.depth}, kind={str(self.kind)!r})"

    def __str__(self) -> str:
        return render(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()


class _Merged(NamedTuple):
    """A node to be, made of one or more listed nodes with the same path."""

    token: int
    parent: int  # in the tree
    score: float
    draws: list[Draw]
    listed: list[int]  # -1 = the root


def _in_pre_order(
    root: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float],
    draws: Sequence[Sequence[Draw]],
) -> tuple[list[_Merged], list[int]]:
    """Return the nodes of the tree, and where each listed node went; the last entry is the root's."""
    kids = _listed_children(parents, draws)
    nodes: list[_Merged] = []
    place = [-1] * len(kids)
    todo = [_Merged(root, -1, 0.0, [], [-1])]
    while todo:
        node = todo.pop()
        for i in node.listed:
            place[i] = len(nodes)
        if any(kids[i] for i in node.listed):
            todo += reversed(_family(len(nodes), node.listed, kids, tokens, scores, draws))
        nodes.append(node)
    if -1 in place:
        raise TreeError(f"listed node {place.index(-1)} cannot be reached from the root: its ancestors loop")
    return nodes, place


def _listed_children(parents: Sequence[int], draws: Sequence[Sequence[Draw]]) -> list[list[int]]:
    """Return the listed children of each listed node, and of the root in the last entry."""
    kids: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise TreeError(f"listed node {i}: parent {parent} is not in the list; -1 is the root")
        if not draws[i]:
            raise TreeError(f"listed node {i} has no draw: say which draft drew it")
        kids[parent].append(i)
    return kids


def _family(
    parent: int,
    listed: list[int],
    kids: list[list[int]],
    tokens: Sequence[int],
    scores: Sequence[float],
    draws: Sequence[Sequence[Draw]],
) -> list[_Merged]:
    """Return, in sibling order, the children of the listed nodes that became the one node `parent`."""
    births = sorted(
        (draft, turn, order, i) for turn, member in enumerate(listed) for i in kids[member] for draft, order in draws[i]
    )
    family: dict[int, _Merged] = {}  # by token
    previous, count = None, 0
    for draft, _, _, i in births:
        count = count + 1 if draft == previous else 0
        previous = draft
        child = family.get(tokens[i])
        if child is None:
            child = family[tokens[i]] = _Merged(tokens[i], parent, scores[i], [], [])
        elif child.score < scores[i]:
            child = family[tokens[i]] = child._replace(score=scores[i])
        child.draws.append(Draw(draft, count))
        if i not in child.listed:
            child.listed.append(i)
    return sorted(family.values(), key=lambda child: (-child.score, child.token))


def _renumbered(parents: list[int], draws: Sequence[tuple[Draw, ...]], keep: list[int]) -> tuple[tuple[Draw, ...], ...]:
    """Return the draws of the nodes that are kept, whose parents are given, numbered 0, 1, ... again."""
    found: list[list[Draw]] = [[] for _ in keep]
    turns: dict[tuple[int, int], int] = {}  # by parent and draft, how many so far
    for parent, draft, _, node in sorted((parents[i], *draw, i) for i, old in enumerate(keep) for draw in draws[old]):
        turn = turns[parent, draft] = turns.get((parent, draft), -1) + 1
        found[node].append(Draw(draft, turn))
    return tuple(map(tuple, found))


def _checked_root(tree: TokenTree) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and scores as lists, after checking their sizes and the root."""
    shapes = {array.shape for array in (tree.tokens, tree.parents, tree.scores)} | {(len(tree.draws),)}
    if len(shapes) > 1 or not tree.draws:
        raise TreeError(f"tokens, parents, scores and draws have shapes {shapes}; each node, root too, needs one")
    token, parent, score = tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()
    if parent[0] != -1 or score[0] != 0 or token[0] < 0 or tree.draws[0]:
        raise TreeError(
            "node 0 is the root: parent -1, score 0, a token id and no draws; "
            f"got {parent[0]}, {score[0]}, {token[0]}, {tree.draws[0]}"
        )
    return token, parent, score


def _checked_shape(tree: TokenTree) -> tuple[list[int], list[dict[int, int]]]:
    """Return each node's depth and its children by token, after checking order, tokens and scores."""
    token, parent, score = _checked_root(tree)
    depths, line = [0], [0]  # line: the root, ..., the previous node
    families: list[dict[int, int]] = [{} for _ in token]
    last = [(-inf, -1)] * len(token)  # sibling key of the newest child of each node
    for i in range(1, len(token)):
        p = parent[i]
        if not 0 <= p < i:
            raise TreeError(f"node {i}: parent {p} does not come before it")
        del line[depths[p] + 1 :]
        if line[-1] != p:
            raise TreeError(f"node {i} is out of depth-first order: the subtree of its parent {p} has ended")
        line.append(i)
        depths.append(depths[p] + 1)
        if not isfinite(score[i]) or score[i] > score[p] + SLACK:
            raise TreeError(f"node {i}: score {score[i]} is not finite or exceeds its parent's, {score[p]}")
        if token[i] < 0 or token[i] in families[p]:
            raise TreeError(f"node {i}: token {token[i]} is no token id, or a sibling has it already")
        key = (-score[i], token[i])
        if key < last[p]:
            raise TreeError(f"node {i} is out of sibling order (score descending, then token id): use from_nodes")
        last[p] = key
        families[p][token[i]] = i
    return depths, families


def _check_draws(families: list[dict[int, int]], draws: tuple[tuple[Draw, ...], ...]) -> None:
    """Raise TreeError unless each draft's draws under each node are numbered 0, 1, ..."""
    for node, family in enumerate(families):
        orders: list[tuple[int, int]] = []
        for child in family.values():
            if not draws[child] or list(draws[child]) != sorted(draws[child]):
                raise TreeError(f"node {child}: draws {draws[child]} are missing or not sorted")
            orders += draws[child]
        previous, count = None, 0
        for draft, order in sorted(orders):
            count = count + 1 if draft == previous else 0
            previous = draft
            if order != count:
                raise TreeError(f"node {node}: draw {count} of draft {draft} under it is missing or doubled")


def _check_laws(tree: TokenTree) -> None:
    """Raise TreeError unless a sampled tree has the law of each draw, or no laws, and a ranked one none."""
    if not tree.laws:
        return
    if tree.kind is Kind.RANKED:
        raise TreeError(f"node {min(tree.laws)[0]}: a ranked tree is not drawn from laws; leave them out")
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    used = set()
    for node in range(1, len(tree)):
        for draft, _ in tree.draws[node]:
            law = tree.laws.get((parents[node], draft))
            if law is None:
                raise TreeError(f"node {parents[node]}: the law that draft {draft} drew its children from is missing")
            if law.ndim != 1 or tokens[node] >= len(law) or not law[tokens[node]] > 0:
                raise TreeError(f"node {node}: token {tokens[node]} has no probability in the law it was drawn from")
            used.add((parents[node], draft))
    if unused := tree.laws.keys() - used:
        node, draft = min(unused)
        raise TreeError(f"node {node}: draft {draft} has a law here, but drew nothing from it")
