"""Questions to a draft at every position of given texts, through the sessions that the engine opens.

Knows: drafts as sources of distributions, the texts that are gone through, the columns that answers go to.
Does not know: how texts were written, files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specinfer.engine.gumbel import RECORDING, key
from specinfer.evaluation.probe import Question
from specinfer.evaluation.traces.closed_forms import accepted_without_replacement, expected_tests
from specinfer.evaluation.traces.trace import TOP, Sizes
from specinfer.evaluation.traces.transport import WITHOUT, best_acceptance
from specinfer.tree import Frontier, Growth, Source, grow_best_first, top_candidates

Columns = dict[str, np.ndarray]  # some of those of `Drafted`, by name


@dataclass(eq=False)
class TextQuestion(Question):
    """A question along texts that are known, asked of a draft at every position of them."""

    plan: Sizes
    texts: Sequence[Sequence[int]]  # token ids per row
    drafted: Sequence[Columns] = ()  # where the answers go, per row: see `blank_columns`

    def __post_init__(self) -> None:
        super().__init__(len(self.texts))

    def levels(self, max_depth: int | None) -> int:
        """Return how many levels are asked about."""
        return self.plan.depth if max_depth is None else min(self.plan.depth, max_depth)

    def along(self, source: Source, max_depth: int | None) -> Iterator[tuple[int, Frontier, list[int]]]:
        """Yield, level by level, the node on each row's text, and the indices of rows that have a next token there.

        The last token that a row's budget allows is never drafted, so it is asked for nowhere.
        """
        ahead = [self.texts[row][self.position : self.plan.max_new_tokens - 1] for row in self.rows]
        padded = [[-1, *tokens, *[0] * self.plan.depth] for tokens in ahead]  # the root comes first
        for level in range(min(self.levels(max_depth), max(map(len, ahead)))):
            asked = [index for index, tokens in enumerate(ahead) if level < len(tokens)]
            tokens = torch.tensor([[row[level]] for row in padded], device=source.device)
            valid = [[not level or index in asked] for index in range(len(ahead))]
            yield level, Frontier.chain(tokens, level, torch.tensor(valid, device=source.device)), asked


class Candidates(TextQuestion):
    """What does the draft rank first at each node along the text?"""

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `Question`."""
        for level, frontier, asked in self.along(source, max_depth):
            tokens, log_probs = (answer[:, 0].cpu() for answer in source.top(frontier, self.plan.top or TOP))
            for index in asked:
                drafted, count = self.drafted[self.rows[index]], int((log_probs[index] > -torch.inf).sum())
                drafted["tokens"][self.position, level, :count] = tokens[index, :count]
                drafted["log_probs"][self.position, level, :count] = log_probs[index, :count].clamp(max=0)


@dataclass(eq=False)
class Distributions(TextQuestion):
    """Which distribution does the draft draw from at each node along the text, and would the token be accepted?"""

    distributions: Sequence[Tensor] = ()  # the target's, (n, V) per row
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = [torch.Generator().manual_seed(key(seed, RECORDING)) for seed in self.seeds]

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `Question`."""
        draws = self.plan.draws
        for level, frontier, asked in self.along(source, max_depth):
            distributions = source.draw(frontier, 1, True)[2][:, 0].float().cpu()  # (B, V)
            for index in asked:
                row, ahead = self.rows[index], self.position + level
                token, p, q = self.texts[row][ahead], self.distributions[row][ahead], distributions[index]
                given, overall = accepted_without_replacement(p, q, token, draws, self.chance[row])
                answers = {
                    **distribution_arrays("distribution", q, self.plan.top),
                    "probability": q[token],
                    "tests": expected_tests(p, q, draws + 1),
                    "without_replacement": given,
                    "accepted_without_replacement": overall,
                    "best": best_acceptance(p, q, draws, replacement=True),
                    "best_without_replacement": best_acceptance(p, q, draws, replacement=False),
                }
                for name, values in answers.items():
                    self.drafted[row][name][self.position, level] = values


_Node = tuple[int, int, bool, float]  # (token, parent, whether it is a node, path score) of a row's slot


class Trees(TextQuestion):
    """Which trees does the draft grow, of any budget and depth up to the plan's?

    Equal scores are ranked by depth and by the parents' ranks, so trees are nested.  Of all nodes that were ever among
    the N best, the n best no deeper than d are `BestFirst(n, d)`, for n <= N.  A pool of N + 1 nodes sends all of
    these nodes but the deepest level to the source, and holds the deepest at the end.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trees: list[list[np.ndarray]] = [[np.zeros((0, 3))] * len(text) for text in self.texts]

    def ask(self, source: Source, max_depth: int | None) -> None:
        """See `Question`."""
        asked: list[list[_Node]] = [[] for _ in self.rows]  # the frontiers below the root, one after the other

        def note(frontier: Frontier, scores: Tensor) -> int:
            for row, nodes in zip(asked, _by_row(frontier, scores), strict=True):
                row += nodes
            return frontier.tokens.shape[1]

        growth = grow_best_first(source, self.plan.nodes + 1, self.levels(max_depth), wanted=note)
        for row, *listed in zip(self.rows, asked, _by_row(growth, growth.scores), strict=True):
            nodes = _union(listed[0], listed[1][1 : self.plan.nodes + 1])
            self.trees[row][self.position] = np.array(nodes, np.float64).reshape(-1, 3)

    def columns(self, row: int) -> Columns:
        """Return a row's trees."""
        nodes = np.concatenate(self.trees[row])
        tokens, parents = nodes[:, :2].astype(np.int32).T.copy()
        return {
            "first": np.cumsum([0, *map(len, self.trees[row])], dtype=np.int32),
            "tree_tokens": tokens,
            "tree_parents": parents,
            "tree_scores": nodes[:, 2].astype(np.float32),
        }


def _by_row(nodes: Frontier | Growth, scores: Tensor) -> list[list[_Node]]:
    columns = (column.tolist() for column in (nodes.tokens, nodes.parents, nodes.valid, scores))
    return [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]


def _union(asked: Sequence[_Node], grown: Sequence[_Node]) -> list[tuple[int, int, float]]:
    """Return (token, parent, path score) of all nodes of a row but the root, best first.

    Args:
        asked: the frontiers below the root.
        grown: the tree without the root.
    """
    found: dict[tuple[int, ...], tuple[float, int]] = {}  # tokens from the root -> path score, index in its list
    for nodes in (asked, grown):
        paths: list[tuple[int, ...]] = [()]  # of the root and all nodes
        for index, (token, parent, valid, score) in enumerate(nodes):
            paths.append((*paths[parent], token) if valid else ())
            if valid:
                found.setdefault(paths[-1], (score, index))
    ranked = sorted(found, key=lambda path: (-found[path][0], len(path), found[path][1]))
    numbers = {path: number for number, path in enumerate([(), *ranked])}
    return [(path[-1], numbers[path[:-1]], found[path][0]) for path in ranked]


def blank_columns(plan: Sizes, n: int, kept: int, draws: int) -> Columns:
    """Return what `Candidates` and `Distributions` fill along n tokens; ``kept`` is k of distributions."""
    depth, top = plan.depth, plan.top or TOP
    ids, of_draws = np.zeros((n, depth, kept), np.int32), np.zeros((n, depth, draws), np.float32)
    return {
        "tokens": np.full((n, depth, top), -1, np.int32),
        "log_probs": np.full((n, depth, top), -np.inf, np.float32),
        "distribution_tokens": ids,
        "distribution_probs": ids.astype(np.float32),
        "probability": np.zeros((n, depth), np.float32),
        "tests": np.tile(np.arange(1, draws + 2, dtype=np.float32), (n, depth, 1)),  # of a q that draws nothing
        "without_replacement": of_draws,
        "accepted_without_replacement": of_draws.copy(),
        "best": of_draws.copy(),
        "best_without_replacement": of_draws[..., :WITHOUT].copy(),
    }


def distribution_arrays(name: str, distributions: Tensor, top: int | None) -> dict[str, np.ndarray]:
    """Return the likeliest tokens of distributions (..., V) and their probabilities; all of them if ``top`` is None."""
    tokens, values = top_candidates(distributions, top or distributions.shape[-1])
    return {f"{name}_tokens": tokens.int().numpy(), f"{name}_probs": values.numpy()}
