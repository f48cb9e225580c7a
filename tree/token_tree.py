"""The token tree, which a draft proposes and one pass of the target scores.

Knows: token ids, log-probabilities, and which draft drew what.  Does not know: models, text, tensors.
A tree is host data and never changes.  The engine works on the trees of a whole batch (`Forest`).

    root          node 0, the last committed token; everything below it was drafted
    score         log-probability of the whole path from the root, under the draft: 0 at the root
    draw          one act of drafting a token under a parent; a token drawn twice there is one node with two draws
    distribution  q, from which the children of a node were drawn; exact verification of sampled trees needs it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specinfer.common.display import Displayed, draw
from specinfer.common.token_text import Tokenizer
from specinfer.errors import TreeError
from specinfer.tree.nodes import Distributions, Draws, Listed, Nodes, ancestors, depth_first, depths_of, in_order

if TYPE_CHECKING:
    import networkx

    from specinfer.common.records import Record

MOST_DRAFTS = 62  # their ids are bits of a mask
ROUNDED = 1e-3  # how far rounding may take the sum of a distribution from 1
SLACK = 1e-6  # how far rounding may lift a child's score above its parent's


class Draw(NamedTuple):
    """One draw that produced a node."""

    draft: int  # which draft drew it
    order: int  # 0, 1, ... among that draft's draws under the same parent


class Kind(StrEnum):
    """How children were chosen.  A verifier is exact for certain kinds only."""

    RANKED = "ranked"  # deterministic given the distributions: top-k, best-first
    IID = "iid"  # drawn independently from q, with replacement
    WITHOUT_REPLACEMENT = "without-replacement"  # drawn from q, renormalised after each draw


class TokenTree(Displayed):
    """An immutable token tree of N nodes in depth-first pre-order; siblings by score descending, then id.

    The order is canonical: two trees with the same nodes are equal array by array.  Use `from_nodes` to build
    one from nodes in any order.

    Args:
        tokens: (N,) ids.
        parents: (N,) numbers of nodes, each less than the number of its child; -1 at the root.
        scores: (N,) log-probabilities of the paths, natural logarithms; 0 at the root.
        draws: per node, sorted; () at the root.
        distributions: (parent, draft) -> (V,) the distribution q that children were drawn from.  A ranked tree has
            none.  A sampled tree has one for each (parent, draft) in ``draws``, or none at all if it is a record
            (`without_distributions`).
        kind: how children were chosen.

    Attributes:
        tokens, parents, scores, distributions, kind: as given; arrays are read-only.
        depths: (N,) int64; 0 at the root.
        nodes: the tree as arrays.
        tokenizer, draft_names: of the result that it belongs to, for display alone; no part of its value.

    Raises:
        TreeError: an invariant is violated; the message names the node.
    """

    nodes: Nodes
    kind: Kind
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    distributions: Distributions
    tokenizer: Tokenizer | None = None
    draft_names: Sequence[str] = ()

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        scores: Sequence[float] | np.ndarray,
        draws: Sequence[Sequence[Draw]],
        distributions: Distributions | None = None,
        kind: Kind = Kind.RANKED,
    ) -> None:
        columns = np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float64)
        _check_columns(*columns, draws)
        drawn = [(node, *draw) for node, node_draws in enumerate(draws) for draw in node_draws]
        nodes = Nodes(
            np.array([0, len(draws)]),
            *columns[:2],
            depths_of(columns[1]),
            columns[2],
            Draws(*np.array(drawn, np.int64).reshape(-1, 3).T),
            _read_only(distributions or {}),
        )
        _check_order(nodes)
        _check_distributions(nodes, Kind(kind))
        self._set(nodes, Kind(kind))

    @classmethod
    def of(cls, nodes: Nodes, kind: Kind) -> TokenTree:
        """Return nodes of one row as a tree, unchecked."""
        tree = cls.__new__(cls)
        tree._set(nodes, kind)
        return tree

    def _set(self, nodes: Nodes, kind: Kind) -> None:
        names = ("tokens", "parents", "depths", "scores", "distributions")
        vars(self).update({name: getattr(nodes, name) for name in names}, nodes=nodes, kind=kind)

    def set_display(self, tokenizer: Tokenizer | None, draft_names: Sequence[str]) -> None:
        """Take note of how tokens and drafts are shown."""
        vars(self).update(tokenizer=tokenizer, draft_names=draft_names)

    def __getstate__(self) -> dict[str, object]:
        """Pickle its value, and not how it is shown."""
        return {name: value for name, value in vars(self).items() if name not in ("tokenizer", "draft_names")}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a token tree cannot be set: trees do not change")

    @classmethod
    def root_only(cls, token: int, kind: Kind = Kind.RANKED) -> TokenTree:
        """Return the tree that drafts nothing."""
        return cls([token], [-1], [0.0], [()], {}, kind)

    @classmethod
    def from_nodes(
        cls,
        root: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        draws: Sequence[Sequence[Draw]],
        distributions: Distributions | None = None,
        kind: Kind = Kind.RANKED,
    ) -> TokenTree:
        """Build the tree from drafted nodes in any order; nodes with the same path become one.

        Args:
            root: the last committed token, which is node 0.
            tokens: of the drafted nodes: listed node i is node i + 1.
            parents: numbers of nodes; 0 is the root.
            scores: of nodes that become one, the largest counts.
            draws: at least one per node.  For each parent and draft they are renumbered 0, 1, ... in the given order.
                If several listed parents become one, the draws under the parent that was drawn first come first.
            distributions: by (node, draft); equal paths have equal distributions, and the first is kept.
            kind: how children were chosen.

        Raises:
            TreeError: a node has no draw, or cannot be reached from the root; or as the constructor.
        """
        if not len(tokens) == len(parents) == len(scores) == len(draws):
            sizes = len(tokens), len(parents), len(scores), len(draws)
            raise TreeError(f"tokens, parents, scores and draws of {sizes} nodes: each listed node needs one")
        for i, (token, parent, node_draws) in enumerate(zip(tokens, parents, draws, strict=True)):
            if not 0 <= parent <= len(tokens):
                raise TreeError(f"listed node {i}: parent {parent} is not in the list; 0 is the root")
            if not node_draws:
                raise TreeError(f"listed node {i} has no draw: say which draft drew it")
            if token < 0:
                raise TreeError(f"listed node {i}: {token} is not a token id")
        if unlisted := [node for node, _ in distributions or {} if not 0 <= node <= len(tokens)]:
            raise TreeError(f"node {min(unlisted)} has a distribution, but is not in the list")
        above, path_scores = np.array([-1, *parents], np.int64), np.array([0.0, *scores])
        drawn = _drawing_order(above, draws)
        nodes = in_order(Listed(np.array([root, *tokens], np.int64), above, path_scores, drawn, distributions or {}), 1)
        return cls(nodes.tokens, nodes.parents, nodes.scores, _draws(nodes), nodes.distributions, kind)

    @classmethod
    def from_paths(cls, root: int, scores: Mapping[tuple[int, ...], float], draft: int) -> TokenTree:
        """Build a ranked tree that one draft proposed whole.

        Args:
            root: the last committed token.
            scores: by path, its tokens from below the root; all beginnings of a path are also listed.
            draft: its id.

        Raises:
            TreeError: as the constructor.
        """
        paths = sorted(scores, key=len)
        numbers = {(): 0} | {path: number for number, path in enumerate(paths, 1)}
        tokens, parents = [path[-1] for path in paths], [numbers[path[:-1]] for path in paths]
        return cls.from_nodes(root, tokens, parents, [scores[path] for path in paths], [[Draw(draft, 0)]] * len(paths))

    @cached_property
    def draws(self) -> tuple[tuple[Draw, ...], ...]:
        """Every node's draws, sorted; () at the root."""
        return _draws(self.nodes)

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """The children of every node by token, in sibling order."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        for node, (token, parent) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if node:
                children[parent][token] = node
        return children

    def __len__(self) -> int:
        """Return the number of nodes, root included."""
        return len(self.nodes)

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
        return list(self._children[node].values())

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that holds `token`, or None."""
        return self._children[node].get(token)

    def along(self, tokens: Iterable[int], node: int = 0) -> list[int]:
        """Return a node, then those that hold these tokens one below the other, as far as there are such nodes."""
        path = [node]
        for token in tokens:
            if (child := self.child(path[-1], token)) is None:
                break
            path.append(child)
        return path

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
        return [self.path(node) for node, children in enumerate(self._children) if not children]

    def ancestor_mask(self) -> np.ndarray:
        """Return the (N, N) bool mask: [i, j] is true where j is i or an ancestor of i."""
        return ancestors(self.nodes)[0]

    def draws_under(self, node: int) -> list[tuple[Draw, int]]:
        """Return every draw made under a node with the child it produced, by draft, then in drawing order."""
        return sorted((draw, child) for child in self.children(node) for draw in self.draws[child])

    def pruned(self, max_depth: int) -> TokenTree:
        """Return the tree without the nodes deeper than `max_depth`.

        Verification of a sampled tree stays exact: depths are known before any token is drawn.
        """
        return TokenTree.of(self.nodes.pruned([max_depth]), self.kind)

    def best(self, count: int, worth: np.ndarray) -> TokenTree:
        """Return the tree of the `count` drafted nodes that are worth most.

        Args:
            count: drafted nodes at most.
            worth: (N,) of each node.  A node that is worth more than its parent counts as its parent does, so ancestors
                are kept.  The root is always kept.  Ties go to the first in node order.

        Raises:
            TreeError: a sampled tree; choosing among drawn tokens biases verification.
        """
        if self.num_drafted <= count:
            return self
        check_ranked(self.kind)
        return TokenTree.of(self.nodes.best(count, worth), self.kind)

    @cached_property
    def proposers(self) -> list[int]:
        """Per node, as a bit mask, the drafts that drew it: bit d for draft d, 0 at the root."""
        return self.nodes.proposers.tolist()

    def without_distributions(self) -> TokenTree:
        """Return the tree as a light record, which verifiers that need distributions can no longer use."""
        return TokenTree.of(replace(self.nodes, distributions={}), self.kind)

    def to_networkx(self) -> networkx.DiGraph:
        """Return a directed graph: nodes carry token, score, depth and draws, edges the probability."""
        import networkx

        graph = networkx.DiGraph(kind=str(self.kind))
        columns = (self.tokens, self.parents, self.scores, self.depths)
        for node, (token, parent, score, depth) in enumerate(zip(*(part.tolist() for part in columns), strict=True)):
            graph.add_node(node, token=token, score=score, depth=depth, draws=self.draws[node])
            if node:
                graph.add_edge(parent, node, probability=self.probability(node))
        return graph

    def probability(self, node: int) -> float:
        """Return the draft's probability of a node given its parent; 1 at the root."""
        if node == 0:
            return 1.0
        return min(1.0, exp(self.scores[node] - self.scores[self.parents[node]]))

    def to_dict(self) -> Record:
        """Return the tree as lists for JSON, from which `from_dict` makes an equal tree."""
        return {
            "kind": str(self.kind),
            "tokens": self.tokens.tolist(),
            "parents": self.parents.tolist(),
            "scores": self.scores.tolist(),
            "draws": [[list(draw) for draw in draws] for draws in self.draws],
            "distributions": [
                {"parent": p, "draft": d, "distribution": q.tolist()}
                for (p, d), q in sorted(self.distributions.items())
            ],
        }

    @classmethod
    def from_dict(cls, data: Record) -> TokenTree:
        """Build the tree that `to_dict` described.  Raises TreeError as the constructor does."""
        draws = tuple(tuple(Draw(*draw) for draw in node) for node in data["draws"])
        distributions = {(q["parent"], q["draft"]): np.array(q["distribution"]) for q in data["distributions"]}
        return cls(data["tokens"], data["parents"], data["scores"], draws, distributions, Kind(data["kind"]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        return f"TokenTree(num_drafted={self.num_drafted}, depth={self.depth}, kind={str(self.kind)!r})"

    def __str__(self) -> str:
        return str(draw("text", self))

    def _repr_svg_(self) -> str:
        return self.to_svg()


def check_ranked(kind: Kind) -> None:
    """Raise TreeError unless nodes of a tree of this kind may be chosen from."""
    if kind is not Kind.RANKED:
        raise TreeError(f"a {kind} tree must be verified whole: choosing among drawn nodes biases the output")


def _draws(nodes: Nodes) -> tuple[tuple[Draw, ...], ...]:
    """Return the draws of every node of one row."""
    found: list[list[Draw]] = [[] for _ in range(len(nodes))]
    columns = (nodes.draws.nodes, nodes.draws.drafts, nodes.ranks)
    for node, draft, rank in zip(*(column.tolist() for column in columns), strict=True):
        found[node].append(Draw(draft, rank))
    return tuple(map(tuple, found))


def _drawing_order(parents: np.ndarray, draws: Sequence[Sequence[Draw]]) -> Draws:
    """Return the draws of listed nodes in drawing order: first those under the parent that was drawn first."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        children[parent].append(node)
    drawn: list[tuple[int, int, int]] = []
    orders, level = {0: 0}, [0]
    while level:
        level = [child for node in level for child in children[node]]
        found = sorted((orders[parents[node]], *draw, node) for node in level for draw in draws[node - 1])
        for order, (_, draft, _, node) in enumerate(found):
            orders.setdefault(node, order)
            drawn.append((node, draft, order))
    if unreached := set(range(len(parents))) - orders.keys():
        raise TreeError(f"listed node {min(unreached) - 1} cannot be reached from the root: its ancestors loop")
    return Draws(*np.array(drawn, np.int64).reshape(-1, 3).T)


def _read_only(distributions: Distributions) -> dict[tuple[int, int], np.ndarray]:
    """Return distributions in float64, without write access."""
    views = {key: np.asarray(distribution, np.float64).view() for key, distribution in distributions.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _check_columns(
    tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, draws: Sequence[Sequence[Draw]]
) -> None:
    """Raise TreeError unless node 0 is a root, and all others have an earlier parent, a score, a token and draws."""
    shapes = {array.shape for array in (tokens, parents, scores)} | {(len(draws),)}
    if len(shapes) > 1 or not draws:
        raise TreeError(f"tokens, parents, scores and draws have shapes {shapes}; each node, root too, needs one")
    token, parent, score = tokens.tolist(), parents.tolist(), scores.tolist()
    if parent[0] != -1 or score[0] != 0 or token[0] < 0 or draws[0]:
        raise TreeError(
            "node 0 is the root: parent -1, score 0, a token id and no draws; "
            f"got {parent[0]}, {score[0]}, {token[0]}, {draws[0]}"
        )
    seen: set[tuple[int, int]] = set()
    for i, p in enumerate(parent[1:], start=1):
        if not 0 <= p < i:
            raise TreeError(f"node {i}: parent {p} does not come before it")
        if not -inf < score[i] <= score[p] + SLACK:
            raise TreeError(f"node {i}: score {score[i]} is not finite or exceeds its parent's, {score[p]}")
        if token[i] < 0 or (p, token[i]) in seen:
            raise TreeError(f"node {i}: {token[i]} is not a token id, or a sibling has it already")
        seen.add((p, token[i]))
        if not draws[i] or list(draws[i]) != sorted(draws[i]):
            raise TreeError(f"node {i}: draws {draws[i]} are missing or not sorted")
        if not 0 <= draws[i][0][0] <= draws[i][-1][0] < MOST_DRAFTS:
            raise TreeError(f"node {i}: draws {draws[i]} are of drafts beyond 0 to {MOST_DRAFTS - 1}")


def _check_order(nodes: Nodes) -> None:
    """Raise TreeError unless nodes are in order, and each draft's draws under each node are numbered 0, 1, ..."""
    numbers, _ = depth_first(nodes.tokens.tolist(), nodes.parents.tolist(), nodes.scores.tolist(), 1)
    if (moved := numbers != np.arange(len(nodes))).any():
        raise TreeError(
            f"node {moved.argmax()} is out of order (depth first, siblings by score descending, then token id): "
            "use from_nodes"
        )
    if (wrong := nodes.draws.orders != nodes.ranks).any():
        draw = wrong.argmax()
        node, draft, rank = nodes.parents[nodes.draws.nodes[draw]], nodes.draws.drafts[draw], nodes.ranks[draw]
        raise TreeError(f"node {node}: draw {rank} of draft {draft} under it is missing or doubled")


def _check_distributions(nodes: Nodes, kind: Kind) -> None:
    """Raise TreeError unless a sampled tree has each draw's distribution, or none at all, and a ranked one has none."""
    distributions = nodes.distributions
    if not distributions:
        return
    if kind is Kind.RANKED:
        raise TreeError(f"node {min(distributions)[0]}: a ranked tree is not drawn from distributions; leave them out")
    used = set()
    for node, draft in zip(nodes.draws.nodes.tolist(), nodes.draws.drafts.tolist(), strict=True):
        parent, token = int(nodes.parents[node]), int(nodes.tokens[node])
        distribution = distributions.get((parent, draft))
        if distribution is None:
            raise TreeError(f"node {parent}: the distribution that draft {draft} drew its children from is missing")
        if distribution.ndim != 1 or token >= len(distribution) or not distribution[token] > 0:
            raise TreeError(f"node {node}: token {token} has no probability in the distribution it was drawn from")
        if (parent, draft) not in used and not abs((total := float(distribution.sum())) - 1) <= ROUNDED:
            raise TreeError(f"node {parent}: what draft {draft} drew from sums to {total:g}, not to 1")
        used.add((parent, draft))
    if unused := distributions.keys() - used:
        node, draft = min(unused)
        raise TreeError(f"node {node}: draft {draft} has a distribution here, but drew nothing from it")
