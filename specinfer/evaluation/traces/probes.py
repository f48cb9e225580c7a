"""What a draft is asked at every position of given texts, through the sessions that the engine opens.

Knows: drafts as sources of distributions, the texts that are gone through.
Does not know: how texts were written, how answers are kept.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.engine.gumbel import RECORDING, key
from specinfer.evaluation.probe import Question
from specinfer.evaluation.traces.acceptance import accepted_without_replacement, expected_tests
from specinfer.evaluation.traces.trace import TOP
from specinfer.tree import Frontier, Source, grow_best_first, top_candidates


class ProbePlan(NamedTuple):
    """How much is recorded."""

    nodes: int  # of best-first trees
    depth: int
    top: int | None  # candidates and tokens of distributions; None = whole distributions
    draws: int


class TextQuestion(Question):
    """A question along texts that are known: what a draft is asked at every position of them."""

    def __init__(self, plan: ProbePlan, texts: Sequence[Sequence[int]], budget: int) -> None:
        super().__init__(len(texts))
        self.plan = plan
        self.texts, self.budget = texts, budget

    @abstractmethod
    def arrays(self, row: int) -> dict[str, np.ndarray]:
        """Return a row's answers as columns of `Drafted`."""

    def levels(self, max_depth: int | None) -> int:
        """Return how many levels are asked about."""
        return self.plan.depth if max_depth is None else min(self.plan.depth, max_depth)

    def along(self, source: Source, max_depth: int | None) -> Iterator[tuple[int, Frontier, list[int]]]:
        """Yield, level by level, the node on each row's text, and the places of rows with a token to be right about.

        The last token that a row's budget allows is never drafted, so it is asked for nowhere.
        """
        ahead = [self.texts[row][self.place : self.budget - 1] for row in self.rows]
        for level in range(min(self.levels(max_depth), max(map(len, ahead)))):
            asked = [place for place, tokens in enumerate(ahead) if level < len(tokens)]
            tokens = [[own[level - 1] if level <= len(own) else 0] for own in ahead] if level else [[-1]] * len(ahead)
            frontier = Frontier(
                torch.tensor(tokens, device=source.device),
                torch.full((len(ahead), 1), level - 1, device=source.device),  # the one node of the level above
                torch.tensor([[not level or place in asked] for place in range(len(ahead))], device=source.device),
                level,
            )
            yield level, frontier, asked


class Candidates(TextQuestion):
    """What does it rank first at each node along the text?"""

    def __init__(self, plan: ProbePlan, texts: Sequence[Sequence[int]], budget: int) -> None:
        super().__init__(plan, texts, budget)
        self.k = plan.top or TOP
        self.tokens = [np.full((len(text), plan.depth, self.k), -1, np.int32) for text in texts]
        self.log_probs = [np.full(tokens.shape, -np.inf, np.float32) for tokens in self.tokens]

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `TextQuestion`."""
        for level, frontier, asked in self.along(source, max_depth):
            tokens, log_probs = (answer[:, 0].cpu() for answer in source.top(frontier, self.k))
            for place in asked:
                row, count = self.rows[place], int((log_probs[place] > -torch.inf).sum())
                self.tokens[row][self.place, level, :count] = tokens[place, :count]
                self.log_probs[row][self.place, level, :count] = log_probs[place, :count].clamp(max=0)

    def arrays(self, row: int) -> dict[str, np.ndarray]:
        """See `TextQuestion`."""
        return {"tokens": self.tokens[row], "log_probs": self.log_probs[row]}


class Distributions(TextQuestion):
    """Which distribution does it draw from at each node along the text, and would the token have been accepted?"""

    def __init__(
        self,
        plan: ProbePlan,
        texts: Sequence[Sequence[int]],
        budget: int,
        distributions: Sequence[Tensor],
        seeds: Sequence[int],
    ) -> None:
        super().__init__(plan, texts, budget)
        self.distributions = distributions  # the target's
        self.chance = [torch.Generator().manual_seed(key(seed, RECORDING)) for seed in seeds]
        vocab = distributions[0].shape[1]
        kept = min(plan.top or vocab, vocab)
        widths = {
            "distribution_tokens": kept,
            "distribution_probs": kept,
            "tests": plan.draws,
            "without_replacement": plan.draws,
        }
        self.columns = [
            {
                "probability": np.zeros((len(text), plan.depth), np.float32),
                **{
                    name: np.zeros((len(text), plan.depth, width), np.int32 if "tokens" in name else np.float32)
                    for name, width in widths.items()
                },
            }
            for text in texts
        ]

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `TextQuestion`."""
        for level, frontier, asked in self.along(source, max_depth):
            distributions = source.draw(frontier, 1, True)[2][:, 0].float().cpu()  # (B, V)
            for place in asked:
                row, node = self.rows[place], (self.place, level)
                token, p, q = (
                    self.texts[row][self.place + level],
                    self.distributions[row][self.place + level],
                    distributions[place],
                )
                answers: dict[str, Any] = {
                    **distribution_arrays("distribution", q, self.plan.top),
                    "probability": q[token],
                    "tests": expected_tests(p, q, self.plan.draws),
                    "without_replacement": accepted_without_replacement(p, q, token, self.plan.draws, self.chance[row]),
                }
                for name, values in answers.items():
                    self.columns[row][name][node] = values

    def arrays(self, row: int) -> dict[str, np.ndarray]:
        """See `TextQuestion`."""
        return self.columns[row]


# A row's nodes of one level, or of the grown tree: (token, parent, is one, path score) each
_Nodes = list[tuple[int, int, bool, float]]


class Trees(TextQuestion):
    """Which trees does it grow, of any budget and depth up to the plan's?

    Equal scores are ranked by depth and by the parents' ranks, so trees are nested: the n best nodes no deeper than d
    of everything that was ever among the N best are `BestFirst(n, d)`, for n <= N.  A pool of N + 1 nodes sends all of
    those but the deepest level to the source, and the deepest is in the pool at the end.
    """

    def __init__(self, plan: ProbePlan, texts: Sequence[Sequence[int]], budget: int) -> None:
        super().__init__(plan, texts, budget)
        self.trees: list[list[np.ndarray]] = [[np.zeros((0, 3))] * len(text) for text in texts]

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `TextQuestion`."""
        levels: list[list[_Nodes]] = []  # by level, then by row

        def note(frontier: Frontier, scores: Tensor) -> int:
            levels.append(_by_row(frontier.tokens, frontier.parents, frontier.valid, scores))
            return frontier.tokens.shape[1]

        growth = grow_best_first(source, self.plan.nodes + 1, self.levels(max_depth), wanted=note)
        grown = _by_row(growth.tokens, growth.parents, growth.valid, growth.scores)
        for place, row in enumerate(self.rows):
            nodes = _union([level[place] for level in levels], grown[place][: self.plan.nodes])
            self.trees[row][self.place] = np.array(nodes, np.float64).reshape(-1, 3)

    def arrays(self, row: int) -> dict[str, np.ndarray]:
        """See `TextQuestion`."""
        nodes = np.concatenate(self.trees[row])
        tokens, parents = nodes[:, :2].astype(np.int32).T.copy()
        return {
            "first": np.cumsum([0, *map(len, self.trees[row])], dtype=np.int32),
            "tree_tokens": tokens,
            "tree_parents": parents,
            "tree_scores": nodes[:, 2].astype(np.float32),
        }


def _by_row(*columns: Tensor) -> list[_Nodes]:
    return [list(zip(*row, strict=True)) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _union(levels: Sequence[_Nodes], grown: _Nodes) -> list[tuple[int, int, float]]:
    """Return (token, parent, path score) of all nodes of a row, best first; parent -1 = the root.

    Args:
        levels: the frontiers below the root; parents count all frontier nodes before, the root as 0.
        grown: the tree; parents count its nodes, the root as 0.
    """
    root = (0, 0)  # nodes are known by their level and their place in it
    nodes: dict[tuple[int, int], tuple[int, tuple[int, int], float]] = {}
    known: dict[tuple[tuple[int, int], int], tuple[int, int]] = {}  # by parent and token
    above = 0  # where the level above begins
    for depth, level in enumerate(levels, 1):
        for place, (token, parent, valid, score) in enumerate(level):
            if valid:
                over = (depth - 1, parent - above)
                nodes[depth, place] = token, over, score
                known[over, token] = depth, place
        above += len(levels[depth - 2]) if depth > 1 else 1
    slots: list[tuple[int, int]] = []
    for slot, (token, parent, valid, score) in enumerate(grown):
        if not valid:
            break
        over = slots[parent - 1] if parent else root
        own = known.get((over, token), (over[0] + 1, slot))
        nodes.setdefault(own, (token, over, score))
        slots.append(own)
    ranked = sorted(nodes, key=lambda node: (-nodes[node][2], *node))
    rank = {node: i for i, node in enumerate(ranked)}
    return [(nodes[node][0], rank.get(nodes[node][1], -1), nodes[node][2]) for node in ranked]


def distribution_arrays(name: str, distributions: Tensor, top: int | None) -> dict[str, np.ndarray]:
    """Return the likeliest tokens of distributions (..., V) and their probabilities; all of them if ``top`` is None."""
    tokens, values = top_candidates(distributions, top or distributions.shape[-1])
    return {f"{name}_tokens": tokens.int().numpy(), f"{name}_probs": values.numpy()}
