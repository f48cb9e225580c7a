"""Growth policies: which nodes a draft scores next, and which of its candidates become the tree.

This module knows distributions, not models: a policy asks a `Source` for the next-token distributions of one
level of nodes at a time.  It works on B rows at once, on the device of the distributions, and does not wait
for that device between levels; `Growth.trees` brings the grown trees to the host in one transfer.

A policy says before a token is drawn how many children a sampled node gets; only then is verification exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log
from operator import mul
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import PolicyError, TreeError
from specinfer.tree.candidates import draw_candidates, top_candidates
from specinfer.tree.forest import Forest
from specinfer.tree.nodes import Draws, Listed
from specinfer.tree.token_tree import Kind, TokenTree

MOST = 1 << 16  # nodes of a tree, and levels
MANY = 1 << 12  # candidates beyond which those that cannot enter the pool are left out before they are sorted


class Frontier(NamedTuple):
    """The nodes whose next-token distributions a policy asks for: one level of B trees."""

    tokens: Tensor  # (B, W) int64; -1 at the root, which the source knows; padding holds some real id
    parents: Tensor  # (B, W) int64: numbers among all nodes (and padding) of earlier frontiers; -1 at the root
    valid: Tensor  # (B, W) bool; False = padding
    depth: int  # of these nodes; the root's is 0


class Source(Protocol):
    """What a draft offers to a policy.  Tokens of probability zero have log-probability -inf."""

    @property
    def batch(self) -> int:
        """The number of rows B."""

    @property
    def device(self) -> torch.device:
        """Where the distributions are."""

    @property
    def draft(self) -> int:
        """The draft's id in the trees."""

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest tokens, no two equal, and their log-probabilities, both (B, W, min(k, V)).

        A node's probabilities sum to 1 at most, or trees of thousands of nodes may lack some.  Descending, ties by the
        smaller id; which of the equals at the end are left out is the source's affair.  At padding anything but NaN.
        """

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return k drawn tokens in drawing order, their log-probabilities, and the distributions drawn from.

        Shapes (B, W, k), (B, W, k) and (B, W, V): see `draw_candidates`.
        """


class Policy(Protocol):
    """How a tree grows: at most `max_nodes` drafted nodes, in at most `max_depth` rounds."""

    @property
    def kind(self) -> Kind:
        """How children are chosen."""

    @property
    def max_nodes(self) -> int:
        """The most nodes a tree can have, root excluded."""

    @property
    def max_depth(self) -> int:
        """The greatest depth a node can have."""

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row of the source, in this call no deeper than `max_depth` (0 asks nothing)."""

    def fit(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Return what the target is to score of one tree per row, each merged from all drafts' trees.

        Sampled trees must come back whole: whether a draw is kept may not depend on what was drawn.
        """


class Growth(NamedTuple):
    """The trees of B rows, M node slots each, on the device of the distributions."""

    tokens: Tensor  # (B, M) int64
    parents: Tensor  # (B, M) int64: 0 is the root, and slot i is node i + 1
    scores: Tensor  # (B, M) log-probability of the path, float32 or float64
    valid: Tensor  # (B, M) bool; False = no node
    kind: Kind
    distributions: tuple[Tensor, ...] = ()  # sampled: (B, W, V) per level; joined, the distribution of node 0, 1, ...

    def trees(self, roots: Sequence[int], draft: int = 0) -> Forest:
        """Bring the trees to the host.  Waits for the device.

        Args:
            roots: the last committed token of each row.
            draft: the id of the draft that grew them, for `Draw.draft`.

        Raises:
            TreeError: as many roots as rows are needed; or a draft's log-probability was not a number.
        """
        if len(roots) != len(self.tokens):
            raise TreeError(f"{len(roots)} roots for {len(self.tokens)} grown trees")
        if not self.tokens.shape[1]:
            return Forest(self.kind, roots)
        return Forest(self.kind, roots, listed=self._listed(np.array(roots, np.int64), draft, *self._brought()))

    def _brought(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, parents, valid and scores: one transfer."""
        if _on_host(self.tokens):
            return self.tokens.numpy(), self.parents.numpy(), self.valid.numpy(), self.scores.double().numpy()
        bits = torch.int64 if self.scores.dtype == torch.float64 else torch.int32
        columns = (self.tokens, self.parents, self.valid, self.scores.view(bits))
        packed = torch.stack([column.long() for column in columns]).cpu()  # (4, B, M)
        tokens, parents, valid, _ = packed.numpy()
        return tokens, parents, valid > 0, packed[3].to(bits).view(self.scores.dtype).double().numpy()

    def _listed(
        self,
        roots: np.ndarray,
        draft: int,
        tokens: np.ndarray,
        parents: np.ndarray,
        valid: np.ndarray,
        scores: np.ndarray,
    ) -> Listed:
        """Return the nodes of all rows, from arrays (B, M) on the host; draws of one node stand in slot order."""
        rows, found = len(roots), scores[valid]
        if not np.isfinite(found).all():
            raise TreeError(f"a node of row {valid.nonzero()[0][~np.isfinite(found)][0]} has a score that is no number")
        numbers = np.cumsum(valid).reshape(valid.shape) + (rows - 1)
        numbers = np.concatenate((np.arange(rows)[:, None], numbers), 1)  # of each row's nodes, its root first
        above = np.take_along_axis(numbers, parents, 1)
        every = np.arange(rows, rows + len(found))
        distributions: dict[tuple[int, int], np.ndarray] = {}
        if self.distributions:
            dense = torch.cat(self.distributions, 1).cpu().double().numpy()
            dense.flags.writeable = False
            families = zip(valid.nonzero()[0].tolist(), parents[valid].tolist(), above[valid].tolist(), strict=True)
            distributions = {(number, draft): dense[row, node] for row, node, number in families}
        return Listed(
            np.concatenate((roots, tokens[valid])),
            np.concatenate((np.full(rows, -1), above[valid])),
            np.concatenate((np.zeros(rows), found)),
            Draws(every, np.full(len(every), draft), every),
            distributions,
            distinct=self.kind is not Kind.IID,
        )


@dataclass(frozen=True)
class BestFirst:
    """The `max_nodes` likeliest paths no deeper than `max_depth`: a heap's tree, but in one pass per level.

    Log-probabilities add up downwards, so the likeliest N nodes hold their own ancestors.  Each round scores
    all nodes of the newest level that are among the N best so far, and the rounds end when there is none.
    Equal scores are ranked by smaller depth, then by the parents' ranks, then by sibling rank, as by a heap
    with that key.

    Args:
        max_nodes: drafted nodes at most.
        max_depth: levels below the root at most.
        min_probability: paths less likely than this are left out, so a draft that knows little drafts little.

    Raises:
        PolicyError: a size that is not a whole number, or negative; a probability outside [0, 1].
    """

    max_nodes: int
    max_depth: int
    min_probability: float = 0.0
    kind: ClassVar[Kind] = Kind.RANKED

    def __post_init__(self) -> None:
        _check_size("max_nodes", self.max_nodes, 0)
        _check_size("max_depth", self.max_depth, 0)
        least = self.min_probability
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise PolicyError(f"min_probability must be between 0 and 1, got {least!r}; 0 keeps all")

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row, asking the source at most `max_depth` times."""
        return grow_best_first(source, self.max_nodes, _limit(self.max_depth, max_depth), self.min_probability)

    def fit(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Return each tree's `max_nodes` likeliest paths, so that several drafts share one budget."""
        return Forest.of(trees).best(self.max_nodes)


def grow_best_first(
    source: Source,
    max_nodes: int,
    max_depth: int,
    min_probability: float = 0.0,
    wanted: Callable[[Frontier, Tensor], int] | None = None,
) -> Growth:
    """Grow as `BestFirst` does, and no further than wanted.

    Args:
        source: what is asked, at most `max_depth` times.
        max_nodes, max_depth, min_probability: as `BestFirst`.
        wanted: told a level's nodes, best first, and their scores, both (B, W), says how many of each row's the
            source is asked about.
    """
    if not (max_nodes and max_depth):
        return _bare(source, BestFirst.kind)
    pool = _Pool(source, max_nodes, log(min_probability) if min_probability else -inf)
    for depth in range(min(max_depth, max_nodes)):
        frontier = pool.newest(depth) if depth else _root(source)
        if depth and wanted and frontier.tokens.shape[1]:
            frontier = pool.narrowed(frontier, wanted(frontier, pool.front[1]))
        if frontier.tokens.shape[1] == 0:
            break
        pool.admit(*source.top(frontier, pool.children(frontier)))
    return pool.growth()


class _Pool:
    """The N best nodes so far of each row, best first.

    Candidates are numbered: the i-th child of the n-th frontier node is n N + i.
    """

    def __init__(self, source: Source, size: int, least: float) -> None:
        self.size = size  # N
        self.least = least  # the smallest score that is let in
        self.scores = torch.full((source.batch, size), -inf, device=source.device)  # (B, N) descending; -inf = empty
        self.numbers = torch.zeros_like(self.scores, dtype=torch.int64)  # (B, N)
        self.tokens = torch.zeros_like(self.numbers)  # (B, N)
        # of the newest frontier, numbers and scores; the root's number is nobody's
        self.front = self.numbers.new_full((source.batch, 1), -1), self.scores.new_zeros(source.batch, 1)
        self.fronts: list[Tensor] = []  # (B, W) numbers
        self.first = self.sent = 0  # frontier nodes before the newest level's parents, and in all

    def admit(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Let the candidates of the frontier, both (B, W, N at most), compete for the pool."""
        numbers, scores = self.front
        self.fronts.append(numbers)
        self.first, self.sent = self.sent, self.sent + tokens.shape[1]
        firsts = torch.arange(self.first * self.size, self.sent * self.size, self.size, device=tokens.device)
        arrivals = firsts[:, None] + torch.arange(tokens.shape[2], device=tokens.device)
        arrivals = arrivals.flatten().expand(len(tokens), -1)
        paths, tokens = _path_scores(scores, log_probs), tokens.flatten(1)
        if self.least > -inf:
            paths.masked_fill_(paths < self.least, -inf)
        if paths.shape[1] > MANY and _on_host(paths):
            places, real = _places(~(paths <= self.scores[:, -1:]))  # not a number is to be seen
            paths = paths.gather(1, places).masked_fill_(~real, -inf)
            arrivals, tokens = arrivals.gather(1, places), tokens.gather(1, places)
        # The pool comes first and parents stand in pool order, so a stable sort breaks ties as the heap does.
        scores, best = torch.cat((self.scores, paths), 1).sort(dim=1, descending=True, stable=True)
        best = best[:, : self.size]
        self.scores = scores[:, : self.size]
        self.numbers = torch.cat((self.numbers, arrivals), 1).gather(1, best)
        self.tokens = torch.cat((self.tokens, tokens), 1).gather(1, best)

    def children(self, frontier: Frontier) -> int:
        """Return how many children of a frontier node may enter the pool, at most.

        The i-th likeliest token of a distribution has at most the probability 1 / i.
        """
        if frontier.tokens.shape[1] * self.size <= MANY or not _on_host(self.scores):
            return self.size
        last = self.scores[:, -1:].clamp(min=self.least)
        return min(self.size, int((self.front[1] - last).nan_to_num(inf).clamp(max=log(self.size)).exp().max()) + 1)

    def newest(self, depth: int) -> Frontier:
        """Return the newest level's nodes that may have children in the pool: any but the last slot's."""
        numbers, scores = self.numbers[:, :-1], self.scores[:, :-1]
        young = (numbers >= self.first * self.size).logical_and_(scores != -inf)
        width = int(young.sum(1).max()) if _on_host(young) else self.size - depth
        valid, slots = (part[:, :width] for part in young.sort(dim=1, descending=True, stable=True))
        numbers = numbers.gather(1, slots)
        self.front = numbers, scores.gather(1, slots).masked_fill_(~valid, -inf)
        return Frontier(self.tokens.gather(1, slots), numbers.div(self.size, rounding_mode="floor"), valid, depth)

    def narrowed(self, frontier: Frontier, width: int) -> Frontier:
        """Return the newest level's best nodes."""
        numbers, scores = self.front
        self.front = numbers[:, :width], scores[:, :width]
        tokens, parents, valid, depth = frontier
        return Frontier(tokens[:, :width], parents[:, :width], valid[:, :width], depth)

    def growth(self) -> Growth:
        """Return the pool as trees."""
        place = self.numbers.div(self.size, rounding_mode="floor")
        above = torch.cat(self.fronts, 1).gather(1, place)  # (B, N) numbers of the parents
        ascending, slots = self.numbers.sort(dim=1, stable=True)  # empty slots hold 0, too, and come later
        parents = slots.gather(1, torch.searchsorted(ascending, above).clamp_(max=self.size - 1)) + 1
        return Growth(
            self.tokens,
            parents.masked_fill_(above < 0, 0),
            self.scores,
            self.scores != -inf,  # not a number is one: it is to be seen
            BestFirst.kind,
        )


@dataclass(frozen=True)
class Expansion:
    """The `expansion[d]` likeliest children of every node at depth d.

    This is SpecInfer's expansion configuration <k1, k2, ...> (arXiv 2305.09781, section 3).

    Raises:
        PolicyError: a width that is not a positive whole number.
    """

    expansion: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.expansion, Sequence):
            raise PolicyError(f"an expansion must be a list of whole numbers, one a level, got {self.expansion!r}")
        object.__setattr__(self, "expansion", tuple(self.expansion))
        for depth, width in enumerate(self.expansion):
            _check_size(f"expansion[{depth}]", width, 1)
        _check_size("the sum of all levels' nodes", self.max_nodes, 0)

    @property
    def kind(self) -> Kind:
        """How children are chosen."""
        return Kind.RANKED

    @property
    def max_nodes(self) -> int:
        """The most nodes a tree can have, root excluded."""
        return sum(accumulate(self.expansion, mul))

    @property
    def max_depth(self) -> int:
        """The number of levels below the root."""
        return len(self.expansion)

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row, asking the source once per level."""
        frontier, scores = _root(source), torch.zeros(source.batch, 1, device=source.device)
        above = 0  # how many nodes were sent before this frontier
        levels: list[tuple[Tensor, ...]] = []  # tokens, parents, scores, valid
        distributions: list[Tensor] = []
        for depth, width in enumerate(self.expansion[: _limit(self.max_depth, max_depth)], start=1):
            tokens, log_probs, *distribution = self._ask(source, frontier, width)
            distributions += distribution
            rows, sent, k = tokens.shape
            scores = _path_scores(scores, log_probs)  # (B, W * k)
            parents = torch.arange(above, above + sent, device=tokens.device).repeat_interleave(k).expand(rows, -1)
            frontier = Frontier(tokens.flatten(1), parents, scores != -inf, depth)
            levels.append((frontier.tokens, parents, scores, frontier.valid))
            above += sent
            if _on_host(scores) and not frontier.valid.any():
                break
        if not levels:
            return _bare(source, self.kind)
        tokens, parents, scores, valid = (torch.cat(c, 1) for c in zip(*levels, strict=True))
        return Growth(tokens, parents, scores, valid, self.kind, tuple(distributions))

    def fit(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Return the trees as they are: a draft's widths are promised, and drawn nodes must not be chosen from."""
        return trees

    def _ask(self, source: Source, frontier: Frontier, k: int) -> tuple[Tensor, ...]:
        return source.top(frontier, k)


class Chain(Expansion):
    """One path of the likeliest tokens: sequence speculation."""

    def __init__(self, length: int) -> None:
        _check_size("length", length, 0)
        super().__init__((1,) * length)

    def __repr__(self) -> str:
        return f"Chain(length={self.max_depth})"


@dataclass(frozen=True)
class Sampled(Expansion):
    """`expansion[d]` draws from q under every draw at depth d, for multi-step speculative sampling.

    With replacement the draws are independent and a token drawn twice stays two draws, each with draws of its
    own below (SpecInfer, arXiv 2305.09781, Algorithm 2).  Without, q is renormalised after each draw, and a
    family ends early where no token of positive probability is left (Sequoia, arXiv 2402.12374, section 3.2).
    """

    replacement: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.replacement, bool):
            raise PolicyError(f"replacement must be True or False, got {self.replacement!r}")

    @property
    def kind(self) -> Kind:
        """How children are chosen."""
        return Kind.IID if self.replacement else Kind.WITHOUT_REPLACEMENT

    def _ask(self, source: Source, frontier: Frontier, k: int) -> tuple[Tensor, ...]:
        return source.draw(frontier, k, self.replacement)


@dataclass
class DenseSource:
    """A source whose distributions are given in full by a function."""

    log_probs: Callable[[Frontier], Tensor]  # (B, W, V), normalised or, for drawing only, not
    batch: int
    generator: torch.Generator | None = None  # for drawing; None = torch's own of the device
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    draft: int = 0

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest tokens of each node: see `top_candidates`."""
        return top_candidates(self.log_probs(frontier), k)

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return k tokens drawn for each node: see `draw_candidates`."""
        return draw_candidates(self.log_probs(frontier), k, replacement, self.generator)


def _on_host(tensor: Tensor) -> bool:
    """Whether a value of the tensor may decide what to do next: elsewhere that would wait for the device."""
    return tensor.device.type == "cpu"


def _root(source: Source) -> Frontier:
    unknown = torch.full((source.batch, 1), -1, device=source.device)
    return Frontier(unknown, unknown, torch.ones_like(unknown, dtype=torch.bool), 0)


def _places(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return where (B, n) are true, row by row and in order, (B, most), and which of those places are real."""
    places = wanted.nonzero()[:, 1]
    counts = wanted.sum(1)
    real = torch.arange(int(counts.max())) < counts[:, None]
    table = torch.zeros(real.shape, dtype=torch.int64)
    table[real] = places
    return table, real


def _path_scores(scores: Tensor, log_probs: Tensor) -> Tensor:
    """Return the scores (B, W * k) of the candidates of frontier nodes (B, W); -inf = no node, or no candidate.

    A log-probability that rounding lifted above 0 counts as 0, so that no child outranks its parent.
    """
    return (scores[:, :, None] + log_probs.clamp(max=0)).flatten(1)


def _bare(source: Source, kind: Kind) -> Growth:
    """Return bare roots."""
    none = torch.empty(source.batch, 0, dtype=torch.int64, device=source.device)
    return Growth(none, none, none.float(), none.bool(), kind)


def _limit(depth: int, max_depth: int | None) -> int:
    if max_depth is None:
        return depth
    _check_size("max_depth", max_depth, 0)
    return min(depth, max_depth)


def _check_size(name: str, value: object, least: int) -> None:
    if isinstance(value, int) and value > MOST:
        raise PolicyError(f"{name}={value} is more than any target scores in one pass: give {MOST} at most")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        what = "a positive whole number" if least else "a whole number, 0 or more"
        hint = "leave the level out to stop above it" if least else "0 drafts nothing"
        raise PolicyError(f"{name} must be {what}, got {value!r}: it counts nodes or levels of a tree; {hint}")
