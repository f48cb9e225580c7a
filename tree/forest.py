"""The trees of a batch, all at once: a policy's question to a draft, the nodes it has grown, and the trees they become.

    `Frontier`   the nodes that a policy asks about, one level of all rows
    `Growth`     what it has grown, on the device of the distributions
    `Slots`      what the target's pass takes of it there
    `Forest`     the same on the host, as soon as somebody looks at nodes: merged and cut; a row becomes a `TokenTree`
                 only when it is asked for

Knows: tensors, which rows and drafts belong together.  Does not know: how arrays on the host are computed (`nodes`),
policies, models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.common.tensors import fetched
from specinfer.errors import TreeError
from specinfer.tree.nodes import Draws, Listed, Nodes, depths_of, in_order, joined, roots_only
from specinfer.tree.token_tree import Kind, TokenTree, check_ranked

Listing = tuple[int, int, float]  # a node in a list on the host: token, parent, log-probability of the path
ROOT: Listing = (-1, -1, 0.0)


class Frontier(NamedTuple):
    """The nodes whose next-token distributions a policy asks for: one level of B trees.

    Node 0 of a row is its root, the first frontier; those of later frontiers follow in order, padding included.
    """

    tokens: Tensor  # (B, W) int64; -1 at the root, which the source knows; any real id in padding
    parents: Tensor  # (B, W) int64 numbers of nodes; -1 at the root, any earlier node in padding
    valid: Tensor  # (B, W) bool; False = padding
    depth: int  # of these nodes; the root's is 0

    @classmethod
    def roots(cls, rows: int, device: torch.device) -> Frontier:
        """Return the first frontier."""
        unknown = torch.full((rows, 1), -1, device=device)
        return cls(unknown, unknown, torch.ones_like(unknown, dtype=torch.bool), 0)

    @classmethod
    def chain(cls, tokens: Tensor, depth: int, valid: Tensor | None = None) -> Frontier:
        """Return a level of one node a row, (B, 1), below the one node of the level before."""
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        return cls(tokens, torch.full_like(tokens, depth - 1), valid, depth)

    def narrowed(self, width: int) -> Frontier:
        """Return the first nodes."""
        tokens, parents, valid, depth = self
        return Frontier(tokens[:, :width], parents[:, :width], valid[:, :width], depth)


class Slots(NamedTuple):
    """What the target's pass takes of grown trees on their device: B rows, T slots each in the order of `Nodes`."""

    tokens: Tensor  # (B, T) int64; -1 at the root
    depths: Tensor  # (B, T) int64; 0 in padding
    visible: Tensor  # (B, T, T) bool; [b, i, j] = node j is node i or one of its ancestors; padding sees itself
    nodes: int  # drafted ones of a row, at most
    levels: int  # below the root, at most


class Growth(NamedTuple):
    """The trees of B rows, M slots each, on the device of the distributions: slot i is node i, and slot 0 the root."""

    tokens: Tensor  # (B, M) int64; -1 at the root, which `trees` is told
    parents: Tensor  # (B, M) int64 numbers of nodes; -1 at the root
    scores: Tensor  # (B, M) log-probability of the path, float32 or float64; 0 at the root
    valid: Tensor  # (B, M) bool; False = no node
    kind: Kind
    distributions: tuple[Tensor, ...] = ()  # sampled: (B, W, V) per level; joined: of nodes 0, 1, ...
    slots: Slots | None = None  # if they are in the order of `Nodes`: see `in_order`

    @classmethod
    def listed(cls, rows: Sequence[Sequence[Listing]]) -> Growth:
        """Return ranked trees that are listed on the host, the root first."""
        width = max(map(len, rows))
        table = np.zeros((3, len(rows), width))
        for row, nodes in enumerate(rows):
            table[:, row, : len(nodes)] = np.array(nodes).T  # ids are below 2 ** 53
        tokens, parents = torch.from_numpy(table[:2].astype(np.int64))
        valid = torch.from_numpy(np.arange(width) < np.array([[len(nodes)] for nodes in rows]))
        return cls(tokens, parents, torch.from_numpy(table[2]), valid, Kind.RANKED)

    def to_host(self, *beside: Tensor) -> tuple[Growth, list[Tensor]]:
        """Bring the trees, but for their distributions, and other tensors to the host in one transfer.

        Args:
            *beside: of truth values, int64, float32 or float64.
        """
        tokens, parents, scores, valid, *others = fetched(*self[:4], *beside)
        return self._replace(tokens=tokens, parents=parents, scores=scores, valid=valid), others

    def in_order(self, width: int, levels: int) -> tuple[Tensor, ...]:
        """Return ranked trees with slots in the order of `Nodes`, padding last, without waiting for the device.

        Siblings are different tokens, so that slot i becomes node i.

        Args:
            width: T, slots of the result, M at least.
            levels: below the root at most.

        Returns:
            tokens, parents, scores and valid, (B, T) each; then depths and visible of `Slots`.
        """
        short = 0, width - self.tokens.shape[1]
        tokens, parents, scores, valid = (pad(column, short) for column in self[:4])  # below the root
        above, numbers = parents.clamp(min=0), torch.arange(width, device=tokens.device)
        sees, ancestors = numbers[:, None] == numbers, above  # 1, 2, 4, ... levels up
        for _ in range(levels.bit_length()):
            sees = sees | sees.expand(len(tokens), -1, -1).gather(1, ancestors[:, :, None].expand(-1, -1, width))
            ancestors = ancestors.gather(1, ancestors)
        sizes = (sees & valid[:, :, None]).sum(1)  # of subtrees
        score, other = scores[:, :, None], scores[:, None]
        is_earlier = (other > score) | ((other == score) & (tokens[:, None] < tokens[:, :, None]))
        is_sibling = (parents[:, None] == parents[:, :, None]) & valid[:, None]
        steps = 1 + (sizes[:, None] * (is_earlier & is_sibling)).sum(2)  # from the parent
        preorder = (sees * steps[:, None]).sum(2).masked_fill_(~valid, 2 * width)
        order = preorder.sort(dim=1, stable=True).indices
        every = tokens, parents, scores, valid, above, sizes
        tokens, parents, scores, valid, above, sizes = (column.gather(1, order) for column in every)
        parents = order.argsort(dim=1).gather(1, above).masked_fill_(parents < 0, -1)
        ends = numbers + sizes.clamp(min=1)  # padding sees itself
        visible = (numbers <= numbers[:, None]) & (numbers[:, None] < ends[:, None])
        depths = (visible.sum(2) - 1).clamp_(max=levels)  # scores that are no numbers are seen later
        return tokens, parents, scores, valid, depths, visible

    def trees(self, roots: Sequence[int], draft: int = 0) -> Forest:
        """Bring the trees to the host.  Waits for the device.

        Args:
            roots: the last committed token of each row.
            draft: the id of the draft that grew them, for `Draw.draft`.

        Raises:
            TreeError: the number of roots is not the number of rows, slot 0 is no root, or a draft's log-probability is
                not a number.
        """
        if len(roots) != len(self.tokens):
            raise TreeError(f"{len(roots)} roots for {len(self.tokens)} grown trees")
        if self.tokens.shape[1] == 1:
            return Forest(self.kind, roots)
        tokens, parents, scores, valid = (column.numpy() for column in fetched(*self[:4]))
        row_of = valid.nonzero()[0]
        numbers = np.cumsum(valid).reshape(valid.shape) - 1  # through all rows
        tokens, parents, scores = tokens[valid], parents[valid], scores[valid].astype(np.float64)
        above = numbers[row_of, parents]
        if not np.isfinite(scores).all():
            raise TreeError(f"a node of row {row_of[~np.isfinite(scores)][0]} has a score that is not a number")
        is_root = parents < 0
        if np.count_nonzero(is_root) != len(roots):
            raise TreeError("slot 0 of a grown tree is its root, with parent -1, and no other node has that parent")
        tokens[is_root], above[is_root] = roots, -1
        drafted = np.flatnonzero(~is_root)
        draws = Draws(drafted, np.full(len(drafted), draft), drafted)  # those of one node stand in slot order
        if self.slots:
            starts = np.append(np.flatnonzero(is_root), len(tokens))
            return Forest(self.kind, roots, Nodes(starts, tokens, above, depths_of(above), scores, draws, {}))
        distributions = self._distributions(row_of[drafted], parents[drafted], above[drafted], draft)
        return Forest(self.kind, roots, Listed(tokens, above, scores, draws, distributions))

    def _distributions(
        self, rows: np.ndarray, nodes: np.ndarray, numbers: np.ndarray, draft: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """Return the distributions below some nodes of rows, by the nodes' numbers through all rows."""
        if not self.distributions:
            return {}
        dense = torch.cat(self.distributions, 1).cpu().double().numpy()
        dense.flags.writeable = False
        drawn = zip(rows.tolist(), nodes.tolist(), numbers.tolist(), strict=True)
        return {(number, draft): dense[row, node] for row, node, number in drawn}


class Forest(Sequence[TokenTree]):
    """The token trees of B rows, all of one kind.

    Args:
        kind: how children were chosen.
        roots: the root token of each row.
        listed: the nodes, in any order; they are put in order when needed.  None = the trees draft nothing.
        slots: nodes in order on a device, which stay there until somebody looks at them.
        read: brings these to the host as trees, and other tensors in the same transfer.

    Attributes:
        slots: None as soon as the nodes are on the host.
    """

    def __init__(
        self,
        kind: Kind,
        roots: Sequence[int],
        listed: Listed | Nodes | None = None,
        slots: Slots | None = None,
        read: Callable[..., tuple[Forest, list[Tensor]]] | None = None,
    ) -> None:
        self.kind, self.roots, self.slots, self._read = kind, list(roots), slots, read
        self._known = roots_only(roots) if listed is None else listed
        self._trees: dict[int, TokenTree] = {}

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Return trees, at least one and all of one kind, as a forest."""
        if isinstance(trees, Forest):
            return trees
        _check_kinds(tree.kind for tree in trees)
        roots = [int(tree.tokens[0]) for tree in trees]
        forest = cls(trees[0].kind, roots, joined([tree.nodes for tree in trees]))
        forest._trees = dict(enumerate(trees))
        return forest

    @classmethod
    def merged(cls, forests: Sequence[Sequence[TokenTree]]) -> Forest:
        """Return the union, row by row, of trees from different drafts that grow from the same roots.

        It keeps all draws, all distributions, and the largest score of each path: verification is exact only if each
        draw is tested against the distribution it came from.  (SpecInfer, arXiv 2305.09781, Definition 3.2, merges
        trees as sets of paths.)

        Raises:
            TreeError: rows, roots or kinds differ, or two forests hold draws of the same draft.
        """
        every = [cls.of(trees) for trees in forests]
        if len(every) == 1:
            return every[0]
        _check_mergeable(every)
        grown = [forest for forest in every if len(forest._listed.draws.nodes)] or every[:1]
        if len(grown) == 1:
            return grown[0]
        return cls(grown[0].kind, grown[0].roots, joined([forest._listed for forest in grown]))

    def fetched(self, *beside: Tensor) -> list[Tensor]:
        """Bring nodes that are on a device to the host, and other tensors in the same transfer."""
        assert self._read is not None
        forest, found = self._read(*beside)
        self._known, self.slots, self._read = forest._known, None, None
        return found

    @property
    def _listed(self) -> Listed | Nodes:
        if self.slots:
            self.fetched()
        return self._known

    @cached_property
    def nodes(self) -> Nodes:
        """The trees as arrays."""
        return self._listed if isinstance(self._listed, Nodes) else in_order(self._listed, len(self))

    def pruned(self, depths: Sequence[int]) -> Forest:
        """Return the trees without the nodes that are deeper than their row's depth."""
        if self.slots and self.slots.levels <= min(depths):
            return self
        return self._with(self.nodes.pruned(depths))

    def best(self, count: int, worth: np.ndarray | Sequence[float] | None = None, together: bool = False) -> Forest:
        """Return the `count` drafted nodes of each tree that are worth most: see `TokenTree.best`.

        Args:
            count: the most drafted nodes of a tree.
            worth: (N,) of all trees' nodes, row after row; None = their scores.
            together: whether the count is of all trees instead.

        Raises:
            TreeError: sampled trees.
        """
        if self.slots and self.slots.nodes <= count and not together:
            return self
        if (len(self.nodes) - len(self) if together else self.nodes.sizes.max() - 1) <= count:
            return self
        check_ranked(self.kind)
        return self._with(self.nodes.best(count, self.nodes.scores if worth is None else worth, together))

    def _with(self, nodes: Nodes) -> Forest:
        return self if nodes is self.nodes else Forest(self.kind, self.roots, nodes)

    def __len__(self) -> int:
        """Return B, the number of rows."""
        return len(self.roots)

    @overload
    def __getitem__(self, row: int) -> TokenTree: ...

    @overload
    def __getitem__(self, row: slice) -> list[TokenTree]: ...

    def __getitem__(self, row: int | slice) -> TokenTree | list[TokenTree]:
        if isinstance(row, slice):
            return list(self)[row]
        row = range(len(self))[row]
        if row not in self._trees:
            self._trees[row] = TokenTree.of(self.nodes.row(row), self.kind)
        return self._trees[row]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Forest({list(self)!r})"


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the union of trees by path: all draws, all distributions, and the largest score of each path.

    Associative and commutative: any grouping and any order give an equal tree.

    Args:
        trees: at least one; of one root token and one kind, each from different drafts.

    Raises:
        TreeError: roots or kinds differ, or two trees hold draws of the same draft.
    """
    if not trees:
        raise TreeError("nothing to merge: give at least one tree")
    return Forest.merged([[tree] for tree in trees])[0]


def _check_mergeable(forests: Sequence[Forest]) -> None:
    """Raise TreeError unless forests are of one kind, with the same roots, from different drafts."""
    _check_kinds(forest.kind for forest in forests)
    if len(rows := {len(forest) for forest in forests}) > 1:
        raise TreeError(f"drafts proposed trees for {' and '.join(map(str, sorted(rows)))} rows: one tree a row, each")
    for row, roots in enumerate(zip(*(forest.roots for forest in forests), strict=True)):
        if len(found := sorted(set(roots))) > 1:
            raise TreeError(f"row {row}: the roots are different tokens, {found}; merge the trees of one row")
    seen: set[int] = set()
    for drafts in (set(forest._listed.draws.drafts.tolist()) for forest in forests):
        if shared := seen & drafts:
            raise TreeError(f"draft {min(shared)} drew in two trees; grow each draft's tree with its own draft id")
        seen |= drafts


def _check_kinds(kinds: Iterable[Kind]) -> None:
    if len(found := set(kinds)) > 1:
        names = ", ".join(sorted(found))
        raise TreeError(f"the trees are of different kinds ({names}), and no verifier is exact for a mixture")


def on_host(device: torch.device) -> bool:
    """Whether a value of a tensor there is read without waiting."""
    return device.type == "cpu"
