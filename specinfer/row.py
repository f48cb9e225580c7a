"""One sequence being decoded: its ids, its law, its chance, and when it ends.

Knows: everything that belongs to one row and to no other, so a row in a batch is the row alone.
Does not know: models, caches, drafts, the other rows.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from specinfer.attention import on_device
from specinfer.errors import NumericalError
from specinfer.noise import COIN, Coupling, key, uniform
from specinfer.results import Step, drafted_by
from specinfer.sampling import Law, Stopping
from specinfer.tree import TokenTree
from specinfer.verify import Probabilities, Verdict


class Row:
    """A sequence under way.

    Args:
        index: its place in the caller's batch.
        prompt: token ids, at least one.
        law: from logits to scores.
        stopping: when it ends.
        seed: of its noise.
        sampling: draw tokens; otherwise take the argmax.
        draft_names: by draft id.
        gate: nothing is drafted after a token to which the target gave a smaller probability; None = always.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        law: Law,
        stopping: Stopping,
        seed: int,
        sampling: bool,
        draft_names: Sequence[str],
        gate: float | None = None,
    ) -> None:
        self.index, self.seed, self.sampling = index, seed, sampling
        self.coupling = Coupling(seed)
        self.law, self.stopping, self.draft_names = law, stopping, draft_names
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.step = 0
        self.gate, self.confident = gate, True  # of the last token; a prompt's is beyond doubt
        self.finished: str | None = None  # "eos", "stop" or "length"

    @property
    def remaining(self) -> int:
        """How many tokens the row may still emit."""
        return self.stopping.budget - (len(self.ids) - self.prompt_length)

    def advance(self, view: "RowView", verdict: Verdict) -> Step:
        """Append the verdict's tokens one by one until the text ends; return the step."""
        tree = view.tree
        emitted: list[int] = []
        if self.gate is not None:
            self.confident = view.probability((0, *verdict.path)[-1], verdict.token) >= self.gate
        for token in (*(int(tree.tokens[node]) for node in verdict.path), verdict.token):
            self.ids.append(token)
            emitted.append(token)
            self.finished = self.stopping.reason(self.ids, len(self.ids) - self.prompt_length)
            if self.finished:
                break
        self.coupling.forget(inf if self.finished else len(self.ids))
        record = tree.without_laws() if tree.laws else tree  # laws are large, and used up
        proposers = drafted_by(tree, verdict.path, self.draft_names, len(emitted))
        return Step(record, verdict.path, tuple(emitted), proposers)


def look(rows: Sequence[Row], trees: Sequence[TokenTree], logits: Tensor) -> list["RowView"]:
    """Return the target's answers at the nodes of every row's tree, from logits (B, N or more, V)."""
    for row in rows:
        row.step += 1
    scored = list(zip(rows, trees, logits, strict=True))
    answers = Answers(scored)
    return [RowView(*own, answers, place) for place, own in enumerate(scored)]


class Answers:
    """What the target chooses after every node of a step's trees: all brought to the host when one is asked for.

    Args:
        scored: rows, their trees, and the logits (N or more, V) after the nodes.
    """

    def __init__(self, scored: Sequence[tuple[Row, TokenTree, Tensor]]) -> None:
        self.scored = scored

    @cached_property
    def choices(self) -> list[list[tuple[int, float]]]:
        """The chosen token and its score, by row and node."""
        best = [self._noisy(*own).max(-1) for own in self.scored]
        largest, tokens = (torch.cat(column) for column in zip(*best, strict=True))
        scores, ids = torch.stack([largest, tokens.to(largest.dtype)]).tolist()  # the one transfer
        found = zip(map(int, ids), scores, strict=True)
        return [list(islice(found, len(tree))) for _, tree, _ in self.scored]

    def _noisy(self, row: Row, tree: TokenTree, logits: Tensor) -> Tensor:
        """Return scores + noise, (N, V)."""
        depths = tree.depths.tolist()
        paths = [[*row.ids, *tree.path(node)] for node in range(len(tree))] if row.law.reads_path else []
        scores = row.law.scores(logits[: len(tree)], paths)
        if not row.sampling:
            return scores
        places = range(len(row.ids), len(row.ids) + max(depths) + 1)
        noise = torch.stack([row.coupling.at(place, scores.shape[1], scores.device) for place in places])
        return scores + noise[on_device(depths, scores.device)]


class RowView:
    """A `TargetView` on one row's logits: each node is processed when it is asked for, and only then.

    Verification visits a handful of a tree's nodes, so warping the others would be wasted work on a CPU; a GPU does
    them all, of all rows, at once rather than wait for each.
    """

    def __init__(
        self, row: Row, tree: TokenTree, logits: Tensor, answers: Answers | None = None, place: int = 0
    ) -> None:
        self.row, self.tree, self.logits = row, tree, logits
        self.answers, self.place = answers or Answers([(row, tree, logits)]), place  # of the step; the row's place
        self.base = len(row.ids)  # position of the token that follows the root
        self.coins = key(row.seed, COIN, self.base)
        self.tosses = 0

    def choice(self, node: int) -> int:
        """Return argmax(scores + noise): the target's greedy choice, or its draw by the Gumbel-max trick.

        The noise depends on seed and position only, so the choice does not depend on the tree, the batch or
        whether there was any speculation (coupled sampling, arXiv 2408.07978).
        """
        if self.logits.device.type != "cpu":
            token, largest = self.answers.choices[self.place][node]
        else:
            scores, noise = self._processed(node), self.noise(node)
            noisy = (scores if noise is None else scores + noise).numpy()
            token = int(noisy.argmax())  # torch's is slow on CPUs
            largest = float(noisy[token])
        self._check(largest, node)
        return token

    def noise(self, node: int) -> Tensor | None:
        """Return the Gumbel noise (V,) that is added to the scores after a node; None when greedy."""
        if not self.row.sampling:
            return None
        position = self.base + int(self.tree.depths[node])
        return self.row.coupling.at(position, self.logits.shape[1], self.logits.device)

    def law(self, node: int) -> Probabilities:
        """Return the target's law after a node, float64 (V,)."""
        scores = self.scores(node)
        if not self.row.sampling:
            return np.eye(1, len(scores), int(scores.argmax()))[0]
        return scores.double().softmax(-1).cpu().numpy()

    def probability(self, node: int, token: int) -> float:
        """Return the target's probability of a token after a node; greedy decoding has one, too."""
        return float(self.scores(node).softmax(-1)[token])

    def accepts(self, probability: float) -> bool:
        """Toss a coin from the row's own stream."""
        self.tosses += 1
        return uniform(self.coins, self.tosses) < probability

    def draw(self, law: Probabilities) -> int:
        """Draw a token by inverting the cumulative law."""
        self.tosses += 1
        cumulative = law.cumsum()
        token = np.searchsorted(cumulative, uniform(self.coins, self.tosses) * cumulative[-1], side="right")
        return int(min(token, law.nonzero()[0][-1]))

    def scores(self, node: int) -> Tensor:
        """Return the processed scores (V,) after a node: the logarithm of the target's law but for a constant.

        Raises:
            NumericalError: nothing can be chosen from them.
        """
        scores = self._processed(node)
        self._check(float(scores.max()), node)
        return scores

    def _processed(self, node: int) -> Tensor:
        row = self.row
        paths = [[*row.ids, *self.tree.path(node)]] if row.law.reads_path else []
        return row.law.scores(self.logits[node : node + 1], paths)[0]

    def _check(self, largest: float, node: int) -> None:
        """Raise unless the largest score is a number: NaN wins a maximum, so this sees NaN, +inf and all -inf."""
        if not isfinite(largest):
            raise NumericalError(
                f"row {self.row.index}, step {self.row.step}: the target's logits after "
                f"{self.base + int(self.tree.depths[node])} tokens are NaN, infinite or all -inf; nothing can be "
                "chosen from them. Check the weights, or load the model in float32"
            )
