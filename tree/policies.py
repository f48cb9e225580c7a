"""Growth policies: which nodes a draft scores next, and which of its candidates become the tree.

Knows: distributions.  Does not know: models.
A policy asks a `Source` for the next-token distributions of one level of nodes at a time.  It works on B rows at once,
on the device of the distributions.  It does not wait for that device between levels: `Growth.trees` brings the grown
trees to the host in one transfer.

A policy decides how many children a sampled node gets before it draws them.  Verification is exact only then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_float
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import exp, inf, log, nextafter
from operator import itemgetter, mul
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.errors import InputError, PolicyError
from specinfer.tree.candidates import draw_candidates, top_candidates
from specinfer.tree.forest import ROOT, Forest, Frontier, Growth, Listing, on_host
from specinfer.tree.lattice import Lattice
from specinfer.tree.token_tree import Kind, TokenTree

MOST = 1 << 16  # nodes of a tree, and levels
MANY = 1 << 12  # candidates of a row's level, above which a source is asked for fewer children of each node


class Source(Protocol):
    """A draft's interface to a policy.  Tokens of probability zero have log-probability -inf."""

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

        The probabilities of a node sum to 1 at most; otherwise large trees may lack some nodes.  Descending, ties by
        the smaller id.  Ties at the cut-off are broken arbitrarily.  At padding: anything but NaN.
        """

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return k drawn tokens in drawing order, their log-probabilities, and the distributions they were drawn from.

        Shapes (B, W, k), (B, W, k) and (B, W, V): see `draw_candidates`.
        """


@runtime_checkable
class LatticeSource(Source, Protocol):
    """A source that also answers for all depths at once."""

    def lattice(self, width: int) -> Lattice:
        """Return the candidates of all depths, at most `width` at each."""


class Policy(ABC):
    """How a tree grows: at most `max_nodes` drafted nodes, in at most `max_depth` rounds.

    A policy that adapts has answers of its own to the questions that the engine asks while it decodes; the others keep
    the defaults.

    Attributes:
        kind: how children are chosen.
        max_nodes: the most nodes a tree can have, root excluded.
        max_depth: the greatest depth a node can have.
        idle: whether no draft is asked in the next step.
        branches: whether a node may have several children.
        adapts: whether it chooses sizes by observation; else `observe` is not called.
        takes_whole: whether it takes trees that it did not grow, and cuts them by score alone.
        prescribes: whether it asks about tokens that no source has named, so only sources of the target's tokens do.
        min_probability: paths less likely than this are left out.
    """

    kind: Kind
    max_nodes: int
    max_depth: int
    idle: bool = False
    branches: bool = True
    adapts: bool = False
    takes_whole: bool = False
    prescribes: bool = False
    min_probability: float = 0.0

    @abstractmethod
    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row of the source, no deeper than `max_depth` in this call (0 asks nothing)."""

    def settled(self, source: Source, max_depth: int) -> Policy | None:
        """Return what `grow` amounts to now if it looks at no value of the source; None: it does, or draws.

        Such a policy is compared by value, takes no more than its `max_depth`, at most this one, and grows in the same
        operations each time.
        """
        return None

    def fit(self, trees: Forest) -> Forest:
        """Return the part of each row's tree that the target scores; each is merged from all drafts' trees.

        A sampled tree must come back complete: whether a draw is kept may not depend on what was drawn.
        """
        return trees

    def begin(self, drafts: int, coupled: bool, rows: int = 1, packed: bool = False) -> Policy:
        """Return the policy for one batch of rows.

        Args:
            drafts: how many there are.
            coupled: whether drafts rank by the target's noise.
            rows: that are decoded at a time, at first.
            packed: whether trees of different sizes cost no more than their nodes.
        """
        return self

    def observe(  # noqa: B027
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        proposing: Sequence[float],
        seconds: float | None,
        coming: int = 0,
    ) -> None:
        """Learn from a step.

        Args:
            trees: that the target scored, one per row.
            paths: accepted nodes, root excluded.
            tokens: that each row emitted.
            proposing: seconds of each draft; 0 if a pass was the first of its shape.
            seconds: of the whole step, drafts included; None if its pass read a prompt as well, or a pass was the first
                of its shape.
            coming: rows that are about to join, whose prompts are being read.
        """

    def room(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return nodes and levels of a tree as caches have room for them: at first, and at most."""
        return (self.max_nodes, self.max_depth), (self.max_nodes, self.max_depth)

    def hidden_layers(self, layers: int) -> Sequence[int]:
        """Return those of a target's layers whose hidden states it needs, counted as transformers does."""
        return ()

    def reasons(self, names: Sequence[str], rows: int) -> str | None:
        """Return the grounds of its choices, in words for a result; None if it makes none.  Names are the drafts'."""
        return None


@dataclass(frozen=True)
class BestFirst(Policy):
    """The `max_nodes` likeliest paths no deeper than `max_depth`: the tree that a heap finds, in one pass per level.

    Log-probabilities add up downwards, so the N likeliest nodes include their ancestors.  Each round scores all nodes
    of the newest level that are among the N best so far.  The rounds end when there is none.  Equal scores are ranked
    by smaller depth, then by the parents' ranks, then by sibling rank, as by a heap with that key.

    Args:
        max_nodes: drafted nodes at most.
        max_depth: levels below the root at most.
        min_probability: paths less likely than this are left out, so an unsure draft drafts little.

    Raises:
        PolicyError: a size that is not a whole number or is negative; a probability outside [0, 1].
    """

    max_nodes: int
    max_depth: int
    min_probability: float = 0.0
    kind = Kind.RANKED  # of the class: no field
    takes_whole = True

    def __post_init__(self) -> None:
        _check_size("max_nodes", self.max_nodes, 0)
        _check_size("max_depth", self.max_depth, 0)
        least = self.min_probability
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise PolicyError(f"min_probability must be between 0 and 1, got {least!r}; 0 keeps all")

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row, asking the source at most `max_depth` times."""
        return grow_best_first(source, self.max_nodes, _limit(self.max_depth, max_depth), self.min_probability)

    def settled(self, source: Source, max_depth: int) -> BestFirst:
        """Return the policy for this depth."""
        return replace(self, max_depth=min(self.max_depth, self.max_nodes, max_depth))

    def fit(self, trees: Forest) -> Forest:
        """Return the `max_nodes` likeliest paths of each tree, so that several drafts share one budget."""
        return trees.best(self.max_nodes)


def grow_best_first(
    source: Source,
    max_nodes: int,
    max_depth: int,
    min_probability: float = 0.0,
    wanted: Callable[[Frontier, Tensor], int] | None = None,
) -> Growth:
    """Grow as `BestFirst` does, but ask about fewer nodes of a level where fewer are wanted.

    Args:
        source: asked at most `max_depth` times; or once, if it answers for all depths and no `wanted` is given.
        max_nodes, max_depth, min_probability: as `BestFirst`.
        wanted: takes a level's nodes, best first, and their scores, both (B, W); returns how many nodes of each row the
            source is asked about.
    """
    if not (max_nodes and max_depth):
        tokens, parents, valid, _ = Frontier.roots(source.batch, source.device)
        return Growth(tokens, parents, _zeros(source), valid, BestFirst.kind)
    least = log(min_probability) if min_probability else -inf
    if wanted is None and hasattr(source, "lattice"):  # a `LatticeSource`; `isinstance` takes far longer
        return source.lattice(max_nodes).best_first(max_nodes, max_depth, least)
    pool = (_HostPool if on_host(source.device) else _Pool)(source, max_nodes, least)
    for depth in range(min(max_depth, max_nodes)):
        frontier, scores = pool.newest(depth) if depth else (Frontier.roots(source.batch, source.device), None)
        width = frontier.tokens.shape[1]
        if scores is not None and wanted and width:
            width = min(width, wanted(frontier, scores))
        if width == 0:
            break
        if width < frontier.tokens.shape[1]:
            frontier = pool.narrowed(frontier, width)
        pool.admit(*source.top(frontier, pool.children()))
    return pool.growth()


class _Pool:
    """The N best nodes so far of each row, best first, where the host must not wait for a device.

    Candidates are numbered: the i-th child of the n-th frontier node is n N + i.
    """

    def __init__(self, source: Source, size: int, least: float) -> None:
        self.size = size  # N
        self.least = least  # the smallest score of a node
        self.scores = torch.full((source.batch, size), -inf, device=source.device)  # (B, N) descending; -inf = empty
        self.numbers = torch.zeros_like(self.scores, dtype=torch.int64)  # (B, N)
        self.tokens = torch.zeros_like(self.numbers)  # (B, N)
        # numbers and scores of the newest frontier; no candidate has the root's number
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
        # The pool comes first and parents stand in pool order, so a stable sort breaks ties as the heap does.
        scores, best = torch.cat((self.scores, paths), 1).sort(dim=1, descending=True, stable=True)
        best = best[:, : self.size]
        self.scores = scores[:, : self.size]
        self.numbers = torch.cat((self.numbers, arrivals), 1).gather(1, best)
        self.tokens = torch.cat((self.tokens, tokens), 1).gather(1, best)

    def children(self) -> int:
        """Return the most children of one frontier node that may enter the pool, as far as the host knows."""
        return self.size

    def newest(self, depth: int) -> tuple[Frontier, Tensor]:
        """Return the nodes of the newest level that may have children in the pool, and their scores (B, W).

        All slots but the last may have some.
        """
        numbers, scores = self.numbers[:, :-1], self.scores[:, :-1]
        young = (numbers >= self.first * self.size).logical_and_(scores != -inf)
        valid, slots = (part[:, : self.size - depth] for part in young.sort(dim=1, descending=True, stable=True))
        numbers = numbers.gather(1, slots)
        self.front = numbers, scores.gather(1, slots).masked_fill_(~valid, -inf)
        parents = numbers.div(self.size, rounding_mode="floor")
        return Frontier(self.tokens.gather(1, slots), parents, valid, depth), self.front[1]

    def narrowed(self, frontier: Frontier, width: int) -> Frontier:
        """Return the best nodes of the newest level."""
        numbers, scores = self.front
        self.front = numbers[:, :width], scores[:, :width]
        return frontier.narrowed(width)

    def growth(self) -> Growth:
        """Return the pool as trees."""
        numbers, scores = pad(self.numbers, (1, 0), value=-1), pad(self.scores, (1, 0))  # the root comes first
        parents = numbers.div(self.size, rounding_mode="floor")  # among frontier nodes
        above = torch.cat(self.fronts, 1).gather(1, parents.clamp(min=0))  # (B, 1 + N) numbers of the parents
        ascending, slots = numbers.sort(dim=1, stable=True)  # empty slots also hold 0, and come later
        found = slots.gather(1, torch.searchsorted(ascending, above).clamp_(max=self.size))
        valid = scores != -inf  # NaN is valid, so that `Growth.trees` sees it
        return Growth(
            pad(self.tokens, (1, 0), value=-1), found.masked_fill_(parents < 0, -1), scores, valid, BestFirst.kind
        )


class _Node(NamedTuple):
    """A node of a `_HostPool`; its parent is a number among the row's frontier nodes, as in `Frontier`."""

    score: float
    token: int
    parent: int


_ROOT, _PADDING = _Node(0.0, -1, -1), _Node(-inf, 0, 0)
_by_score = itemgetter(0)


def _single(number: float) -> float:
    """Return a number as float32 has it."""
    return c_float(number).value


class _HostPool:
    """`_Pool` for distributions in host memory, in lists: candidates that cannot enter it are not looked at."""

    def __init__(self, source: Source, size: int, least: float) -> None:
        self.size = size
        self.least = nextafter(least, -inf)  # a node's score is larger
        self.pools: list[list[_Node]] = [[] for _ in range(source.batch)]  # best first
        self.fronts = [[_ROOT] for _ in self.pools]  # the nodes of all frontiers
        self.first, self.width = 0, 1  # nodes before the newest frontier, and in it

    def admit(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Let the candidates of the frontier, both (B, W, N at most), compete for the pool."""
        rounded = float if log_probs.dtype == torch.float64 else _single  # sums are those of `_path_scores`
        for row, (front, *candidates) in enumerate(zip(self.fronts, tokens.tolist(), log_probs.tolist(), strict=True)):
            worst = self._worst(row)
            arrivals: list[_Node] = []
            nodes = zip(front[self.first :], *candidates, strict=True)
            for number, (node, ids, chances) in enumerate(nodes, start=self.first):
                for token, chance in zip(ids, chances, strict=True):
                    score = rounded(node.score + min(chance, 0.0))
                    if score <= worst:  # and so are the others: the likeliest come first
                        break
                    arrivals.append(_Node(score if score == score else inf, token, number))  # inf is seen later
            # The pool comes first and parents stand in pool order, so a stable sort breaks ties as the heap does.
            self.pools[row] = sorted(self.pools[row] + arrivals, key=_by_score, reverse=True)[: self.size]

    def children(self) -> int:
        """Return the most children of one frontier node that may enter the pool.

        The i-th likeliest token of a distribution has at most the probability 1 / i.
        """
        if self.width * self.size <= MANY:
            return self.size
        gaps = [max(front[self.first :])[0] - self._worst(row) for row, front in enumerate(self.fronts)]
        return min(self.size, int(exp(min(max(gaps), log(self.size)))) + 1)

    def newest(self, depth: int) -> tuple[Frontier, Tensor]:
        """Return the nodes of the newest level that may have children in the pool: see `_Pool`."""
        level = [[node for node in pool[: self.size - 1] if node.parent >= self.first] for pool in self.pools]
        self.first, self.width = self.first + self.width, max(map(len, level))
        for front, nodes in zip(self.fronts, level, strict=True):
            nodes += [_PADDING] * (self.width - len(nodes))
            front += nodes
        columns = zip(*chain(*level), strict=True) if self.width else ((), (), ())
        table = (np.array(column).reshape(len(level), -1) for column in columns)
        scores, tokens, parents = map(torch.from_numpy, table)
        return Frontier(tokens, parents, scores > -inf, depth), scores

    def narrowed(self, frontier: Frontier, width: int) -> Frontier:
        """Return the best nodes of the newest level."""
        self.width = width
        for front in self.fronts:
            del front[self.first + self.width :]
        return frontier.narrowed(width)

    def growth(self) -> Growth:
        """Return the pool as trees."""
        rows: list[list[Listing]] = []
        for pool, front in zip(self.pools, self.fronts, strict=True):
            numbers = {node: number for number, node in enumerate(pool, start=1)}
            rows.append([ROOT, *((token, numbers.get(front[parent], 0), score) for score, token, parent in pool)])
        return Growth.listed(rows)

    def _worst(self, row: int) -> float:
        """Return the score that a candidate must exceed."""
        pool = self.pools[row]
        return pool[-1].score if len(pool) == self.size else self.least


@dataclass(frozen=True)
class Expansion(Policy):
    """The `expansion[d]` likeliest children of every node at depth d.

    This is SpecInfer's expansion configuration <k1, k2, ...> (arXiv 2305.09781, section 3).

    Raises:
        PolicyError: a width that is not a positive whole number.
    """

    expansion: tuple[int, ...]
    kind = Kind.RANKED  # of the class: no field

    def __post_init__(self) -> None:
        if not isinstance(self.expansion, Sequence) or isinstance(self.expansion, str | bytes):
            raise PolicyError(f"an expansion must be a list of whole numbers, one a level, got {self.expansion!r:.60}")
        object.__setattr__(self, "expansion", tuple(self.expansion))
        for depth, width in enumerate(self.expansion):
            _check_size(f"expansion[{depth}]", width, 1)
        _check_size("the sum of all levels' nodes", self.max_nodes, 0)

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        """The most nodes a tree can have, root excluded."""
        return sum(accumulate(self.expansion, mul))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        """The number of levels below the root."""
        return len(self.expansion)

    @property
    def branches(self) -> bool:  # type: ignore[override]
        """Whether a node has several children."""
        return any(width > 1 for width in self.expansion)

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row, asking the source once per level."""
        frontier, scores = Frontier.roots(source.batch, source.device), _zeros(source)
        sent = 0  # nodes of earlier frontiers
        levels = [(frontier.tokens, frontier.parents, scores, frontier.valid)]
        distributions: list[Tensor] = []
        for depth, width in enumerate(self.expansion[: _limit(self.max_depth, max_depth)], start=1):
            tokens, log_probs, *distribution = self._ask(source, frontier, width)
            distributions += distribution
            rows, asked, k = tokens.shape
            scores = _path_scores(scores, log_probs)  # (B, W * k)
            parents = torch.arange(sent, sent + asked, device=tokens.device).repeat_interleave(k).expand(rows, -1)
            frontier = Frontier(tokens.flatten(1), parents, scores != -inf, depth)
            levels.append((frontier.tokens, parents, scores, frontier.valid))
            sent += asked
            if on_host(scores.device) and not frontier.valid.any():
                break
        tokens, parents, scores, valid = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        return Growth(tokens, parents, scores, valid, self.kind, tuple(distributions))

    def settled(self, source: Source, max_depth: int) -> Policy | None:
        """Return the policy for this depth."""
        return Expansion(self.expansion[:max_depth])

    def _ask(self, source: Source, frontier: Frontier, k: int) -> tuple[Tensor, ...]:
        return source.top(frontier, k)


class Chain(Expansion):
    """One path of the likeliest tokens: sequence speculation.

    Every draft grows its own.  Several drafts' chains are merged, into a tree that branches where they disagree.
    """

    def __init__(self, length: int) -> None:
        _check_size("length", length, 0)
        super().__init__((1,) * length)

    def __repr__(self) -> str:
        return f"Chain(length={self.max_depth})"


@dataclass(frozen=True)
class Sampled(Expansion):
    """`expansion[d]` draws from q under every draw at depth d, for multi-step speculative sampling.

    With replacement the draws are independent.  A token drawn twice counts as two draws, each with its own draws below
    (SpecInfer, arXiv 2305.09781, Algorithm 2).  Without replacement q is renormalised after each draw, and a node gets
    fewer children if no token of positive probability is left (Sequoia, arXiv 2402.12374, section 3.2).
    """

    replacement: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.replacement, bool):
            raise PolicyError(f"replacement must be True or False, got {self.replacement!r}")

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """How children are chosen."""
        return Kind.IID if self.replacement else Kind.WITHOUT_REPLACEMENT

    def settled(self, source: Source, max_depth: int) -> None:
        """Return None: draws take other random numbers each time."""

    def _ask(self, source: Source, frontier: Frontier, k: int) -> tuple[Tensor, ...]:
        return source.draw(frontier, k, self.replacement)


@dataclass
class DenseSource:
    """A source whose distributions are given in full by a function."""

    log_probs: Callable[[Frontier], Tensor]  # (B, W, V), normalised or, for drawing only, not
    batch: int
    generator: torch.Generator | None = None  # for drawing; None = torch's default one of the device
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    draft: int = 0

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest tokens of each node: see `top_candidates`."""
        return top_candidates(self._asked(frontier), k)

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return k tokens drawn for each node: see `draw_candidates`."""
        return draw_candidates(self._asked(frontier), k, replacement, self.generator)

    def _asked(self, frontier: Frontier) -> Tensor:
        """Return the distributions below a frontier; InputError if the function's answer is none of them."""
        found, (rows, width) = self.log_probs(frontier), frontier.tokens.shape
        is_shaped = isinstance(found, Tensor) and found.shape[:-1] == (rows, width) and found.shape[-1] > 0
        if is_shaped and found.is_floating_point():
            return found
        kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"log_probs of draft {self.draft} returned {kind}: give floats of shape ({rows}, {width}, V)")


def _zeros(source: Source) -> Tensor:
    """Return the scores of the roots, (B, 1)."""
    return torch.zeros(source.batch, 1, device=source.device)


def _path_scores(scores: Tensor, log_probs: Tensor) -> Tensor:
    """Return the scores (B, W * k) of the candidates of frontier nodes (B, W); -inf = no node, or no candidate.

    A log-probability that rounding lifted above 0 counts as 0, so no child outranks its parent.
    """
    return (scores[:, :, None] + log_probs.clamp(max=0)).flatten(1)


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
