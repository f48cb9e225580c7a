"""What the target says at the nodes of one row's tree: choices, distributions, acceptance tests.

Knows: logits, one sequence's processors and noise.  Does not know: models, caches, which nodes are asked about.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from specinfer.common.values import plain
from specinfer.engine.gumbel import COIN, key, uniform
from specinfer.engine.sampling import Processors, resolve
from specinfer.engine.sequence import Row
from specinfer.engine.stopping import Stopping
from specinfer.engine.verify import Probabilities, Verdict, Verifier, chosen_verifier
from specinfer.errors import InputError, NumericalError
from specinfer.prompts import check_ids
from specinfer.tree import TokenTree


def target_views(rows: Sequence[Row], trees: Sequence[TokenTree], logits: Tensor) -> list["RowView"]:
    """Return the target's answers at the nodes of every row's tree, from logits (B, N or more, V)."""
    for row in rows:
        row.step += 1
    views = [RowView(*own) for own in zip(rows, trees, logits, strict=True)]
    together = [ref(view) for view in views]
    for view in views:
        view.together = together
    return views


class RowView:
    """A `TargetView` on one row's logits.

    Verification visits a handful of a tree's nodes.  On a CPU, each is processed when it is asked for, and only then.
    A GPU does all nodes of all rows when one is asked for: to wait for it once is what costs.

    Attributes:
        together: the views of a step, this one among them; held weakly, so that logits go with the step.
    """

    def __init__(self, row: Row, tree: TokenTree, logits: Tensor) -> None:
        self.row, self.tree, self.logits = row, tree, logits
        self.base = len(row.ids)  # position of the token that follows the root
        self.coins = key(row.seed, COIN, self.base)
        self.tosses = 0
        self.together: Sequence[ref[RowView]] = (ref(self),)
        self._chosen: dict[int, tuple[int, float]] = {}  # by node, the target's choice and its score

    def choice(self, node: int) -> int:
        """Return argmax(scores + noise): the target's greedy choice, or its draw by the Gumbel-max trick.

        The noise depends on seed and position only, so the choice does not depend on the tree, the batch or
        whether there was any speculation (coupled sampling, arXiv 2408.07978).
        """
        if node not in self._chosen:
            if self.logits.device.type == "cpu":
                _choose([(self, [node])])
            else:
                views = [view for own in self.together if (view := own())]
                _choose([(view, range(len(view.tree))) for view in views])
        token, largest = self._chosen[node]
        self._check(largest, node)
        return token

    def noisy(self, nodes: Sequence[int]) -> Tensor:
        """Return scores + noise after some nodes, (n, V)."""
        scores, noise = self._processed(nodes), [own for node in nodes if (own := self.noise(node)) is not None]
        if not noise:
            return scores
        return scores + (torch.stack(noise) if len(noise) > 1 else noise[0])

    def noise(self, node: int) -> Tensor | None:
        """Return the Gumbel noise (V,) that is added to the scores after a node; None when greedy."""
        if not self.row.sampling:
            return None
        position = self.base + int(self.tree.depths[node])
        return self.row.coupling.at(position, self.logits.shape[1], self.logits.device)

    def distribution(self, node: int) -> Probabilities:
        """Return the target's distribution after a node, float64 (V,)."""
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

    def draw(self, distribution: Probabilities) -> int:
        """Draw a token by inverting the cumulative distribution."""
        self.tosses += 1
        cumulative = distribution.cumsum()
        token = np.searchsorted(cumulative, uniform(self.coins, self.tosses) * cumulative[-1], side="right")
        return int(min(token, distribution.nonzero()[0][-1]))

    def scores(self, node: int) -> Tensor:
        """Return the processed scores (V,) after a node: the logarithm of the target's distribution but for a constant.

        Raises:
            NumericalError: nothing can be chosen from them.
        """
        scores = self._processed([node])[0]
        self._check(float(scores.max()), node)
        return scores

    def _processed(self, nodes: Sequence[int]) -> Tensor:
        """Return the processed scores (n, V) after some nodes: one, or the first n."""
        processors = self.row.processors
        paths = [[*self.row.ids, *self.tree.path(node)] for node in nodes] if processors.reads_path else []
        return processors.scores(self.logits[nodes[0] : nodes[-1] + 1], paths)

    def _check(self, largest: float, node: int) -> None:
        """Raise unless the largest score is a number: NaN wins a maximum, so this sees NaN, +inf and all -inf."""
        if not isfinite(largest):
            raise NumericalError(
                f"row {self.row.index}, step {self.row.step}: the target's logits after "
                f"{self.base + int(self.tree.depths[node])} tokens are NaN, infinite or all -inf; nothing can be "
                "chosen from them. Check the weights, or load the model in float32"
            )


def _choose(wanted: Sequence[tuple[RowView, Sequence[int]]]) -> None:
    """Let views know the target's choices after some of their nodes: one transfer from the device."""
    noisy = [view.noisy(nodes) for view, nodes in wanted]
    if noisy[0].device.type == "cpu":  # torch's own maximum is slow there
        found = [(token := int(row.argmax()), float(row[token])) for scores in noisy for row in scores.numpy()]
    else:
        best, places = (torch.cat(column) for column in zip(*(scores.max(-1) for scores in noisy), strict=True))
        largest, tokens = torch.stack([best, places.to(best.dtype)]).tolist()
        found = list(zip(map(int, tokens), largest, strict=True))
    left = iter(found)
    for view, nodes in wanted:
        view._chosen.update(zip(nodes, left, strict=False))


def verify_tree(
    tree: TokenTree,
    logits: Tensor,
    *,
    verifier: Verifier | None = None,
    prefix: Sequence[int] = (),
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """Verify one tree on given logits, as a decode step does: no model is needed, so rules can be compared.

    Args:
        tree: of N nodes.
        logits: (N, V), the target's after each node.
        verifier: the rule; None is the usual one for the tree's kind.
        prefix: the token ids before the root: processors read them, and noise depends on how many there are.
        seed: of all chance.
        **options: any ``GenerationConfig`` field: temperature, top_p, ...; greedy without.

    Returns:
        Verdict: accepted nodes, and the token after them.

    Raises:
        InputError: logits of another shape or vocabulary than the tree's; a prefix that is no ids, or no seed.
        PairingError: the rule would be biased on such trees.
        SamplingError: an option, by name.
        NumericalError: nothing can be chosen from the logits.
    """
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(tree)
    if not fits or logits.shape[1] <= int(tree.tokens.max()):
        raise InputError(
            f"logits {tuple(getattr(logits, 'shape', ()))} for a tree of {len(tree)} nodes with ids up to "
            f"{int(tree.tokens.max())}: give a tensor with one row of the target's logits for each node"
        )
    if any(len(distribution) != logits.shape[1] for distribution in tree.distributions.values()):
        raise InputError(
            f"the tree's distributions are not of {logits.shape[1]} tokens, as the logits: pad or cut either"
        )
    if isinstance(seed, bool) or not isinstance(seed := plain(seed), int):
        raise InputError(f"seed={seed!r:.60}: give one whole number")
    rule = chosen_verifier(verifier, tree.kind)
    settings = resolve(GenerationConfig(), vocab_size=logits.shape[1], **options)
    ids = [*plain(prefix), int(tree.tokens[0])]
    check_ids([ids], logits.shape[1])
    processors, stopping = Processors.of(settings, len(ids), logits.device), Stopping(settings, 1, logits.device)
    row = Row(0, ids, processors, stopping, seed, settings.do_sample, draft_names=())
    with torch.inference_mode():
        return rule.verify(tree, target_views([row], [tree], logits[None])[0])
