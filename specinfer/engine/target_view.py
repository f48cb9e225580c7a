"""The target at the nodes of one row's tree: its choices and distributions, and the coins of acceptance tests.

Knows: logits, one sequence's processors and noise.  Does not know: models, caches, which nodes verification visits.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import isfinite
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from specinfer.common.tensors import on_device
from specinfer.common.values import plain
from specinfer.engine.gumbel import COIN, key, uniform
from specinfer.engine.sampling import resolve
from specinfer.engine.sequence import Row
from specinfer.engine.verify import Probabilities, Verdict, Verifier, chosen_verifier
from specinfer.errors import CHECK_WEIGHTS, InputError, NumericalError
from specinfer.prompts import check_ids
from specinfer.tree import TokenTree


def target_views(rows: Sequence[Row], trees: Sequence[TokenTree], logits: Iterable[Tensor]) -> list["RowView"]:
    """Return a view of the target for every row's tree, from its logits (N, V)."""
    for row in rows:
        row.step += 1
    views = [RowView(*row) for row in zip(rows, trees, logits, strict=True)]
    step = [ref(view) for view in views]
    for view in views:
        view.step = step
    return views


class RowView:
    """A `TargetView` on one row's logits.

    Verification visits a few of a tree's nodes.  On a CPU, a node is processed when verification asks for it.  On a
    GPU, all nodes of all rows are processed when it asks for the first one, because each wait for a GPU costs much.
    Rows with functions of the caller's are processed node by node everywhere, each node once: see `callables`.

    Attributes:
        step: the views of the step, this one included.  The references are weak: logits are freed with the step.
    """

    def __init__(self, row: Row, tree: TokenTree, logits: Tensor) -> None:
        self.row, self.tree, self.logits = row, tree, logits
        self.base = len(row.ids)  # position of the token that follows the root
        self.tosses = 0
        self.step: Sequence[ref[RowView]] = (ref(self),)
        self._chosen: dict[int, tuple[int, float]] = {}  # by node, the target's choice and its score
        self._scores: dict[int, Tensor] = {}  # by node, what may be processed only once

    @cached_property
    def coins(self) -> int:
        """The key of the row's coins and draws in this step."""
        return key(self.row.seed, COIN, self.base)

    def choice(self, node: int) -> int:
        """Return argmax(scores + noise): the target's greedy choice, or its draw by the Gumbel-max trick.

        The noise depends on seed and position only.  So the choice does not depend on the tree or the batch, or on
        whether there is speculation at all (coupled sampling, arXiv 2408.07978).
        """
        if node not in self._chosen:
            if self.logits.device.type == "cpu" or self.row.processors.in_order:
                _choose([(self, [node])])
            else:
                views = [view for reference in self.step if (view := reference()) and not view.row.processors.in_order]
                _choose([(view, range(len(view.tree))) for view in views])
        token, largest = self._chosen[node]
        self._check(largest, node)
        return token

    def noisy(self, nodes: Sequence[int]) -> Tensor:
        """Return scores + noise after some nodes, (n, V)."""
        scores, noise = self._processed(nodes), [noise for node in nodes if (noise := self.noise(node)) is not None]
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
        if not self.row.sampling:
            return np.eye(1, self.logits.shape[1], self.choice(node))[0]
        probabilities: Probabilities = self._processed([node])[0].double().softmax(-1).cpu().numpy()
        self._check(float(probabilities.max()), node)  # of such scores, a softmax is NaN
        return probabilities

    def probability(self, node: int, token: int) -> float:
        """Return the target's probability of a token after a node, also in greedy decoding."""
        probability = float(self._processed([node])[0].softmax(-1)[token])
        self._check(probability, node)
        return probability

    def log_probabilities(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the target's own log-probabilities, without processors, of a token after each of some nodes."""
        return log_probabilities(self.logits[on_device(nodes, self.logits.device)], tokens)

    def accepts(self, probability: float) -> bool:
        """Toss a coin from the row's stream of random numbers."""
        self.tosses += 1
        return uniform(self.coins, self.tosses) < probability

    def draw(self, distribution: Probabilities) -> int:
        """Draw a token by inverting the cumulative distribution."""
        self.tosses += 1
        cumulative = distribution.cumsum()
        token = np.searchsorted(cumulative, uniform(self.coins, self.tosses) * cumulative[-1], side="right")
        return int(min(token, distribution.nonzero()[0][-1]))

    def scores(self, node: int) -> Tensor:
        """Return the processed scores (V,) after a node: log probabilities of the target plus a constant.

        Raises:
            NumericalError: nothing can be chosen from them.
        """
        scores = self._processed([node])[0]
        self._check(float(scores.max()), node)
        return scores

    def _processed(self, nodes: Sequence[int]) -> Tensor:
        """Return the processed scores (n, V) after consecutive nodes."""
        processors = self.row.processors
        if processors.in_order and nodes[0] in self._scores:
            return self._scores[nodes[0]]
        logits = self.logits[nodes[0] : nodes[-1] + 1]
        if processors.in_order and not self.row.stopping.eos.isdisjoint(self.tree.path(nodes[0])):
            return logits.float()  # the text has ended, and nobody is asked what would follow
        paths = [[*self.row.ids, *self.tree.path(node)] for node in nodes] if processors.reads_path else []
        scores = processors.scores(logits, paths)
        if processors.in_order:
            self._scores[nodes[0]] = scores
        return scores

    def _check(self, largest: float, node: int) -> None:
        """Raise unless the largest score is finite: NaN wins a maximum, so this sees NaN, +inf and all -inf."""
        if not isfinite(largest):
            where = f"row {self.row.index}, step {self.row.step}"
            length = self.base + int(self.tree.depths[node])
            raise NumericalError(
                f"{where}: the target's logits after {length} tokens are NaN, infinite or all -inf. {CHECK_WEIGHTS}"
            )


def log_probabilities(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the natural logarithms of the probabilities of T tokens, under the logits (T, V) that choose them."""
    found = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return found.gather(1, on_device(tokens, logits.device)[:, None])[:, 0].tolist()


def _choose(wanted: Sequence[tuple[RowView, Sequence[int]]]) -> None:
    """Store in views the target's choices after some of their nodes, with one transfer from the device."""
    noisy = [view.noisy(nodes) for view, nodes in wanted]
    if noisy[0].device.type == "cpu":  # where torch's maximum is slower than numpy's
        chosen = iter([(token := int(row.argmax()), float(row[token])) for scores in noisy for row in scores.numpy()])
    else:
        best, columns = (torch.cat(parts) for parts in zip(*(scores.max(-1) for scores in noisy), strict=True))
        largest, tokens = torch.stack([best, columns.to(best.dtype)]).tolist()
        chosen = zip(map(int, tokens), largest, strict=True)
    for view, nodes in wanted:
        view._chosen.update(zip(nodes, chosen, strict=False))


def verify_tree(
    tree: TokenTree,
    logits: Tensor,
    *,
    verifier: Verifier | None = None,
    prefix: Sequence[int] = (),
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """Verify one tree on given logits, as a decode step does.  No model is needed, so rules are easy to compare.

    Args:
        tree: of N nodes.
        logits: (N, V), the target's after each node.
        verifier: the rule; None is the usual one for the tree's kind.
        prefix: the token ids before the root: processors read them, and noise depends on how many there are.
        seed: of all random numbers.
        **options: any ``GenerationConfig`` field: temperature, top_p, ...; greedy without.

    Returns:
        Verdict: accepted nodes, and the token after them.

    Raises:
        InputError: logits of another shape or vocabulary than the tree's; a bad prefix or seed.
        PairingError: the rule would be biased on such trees.
        SamplingError: an option that is unknown or impossible, by name.
        NumericalError: nothing can be chosen from the logits.
    """
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(tree)
    if not fits or logits.shape[1] <= int(tree.tokens.max()):
        raise InputError(
            f"logits {tuple(getattr(logits, 'shape', ()))} for a tree of {len(tree)} nodes with ids up to "
            f"{int(tree.tokens.max())}: give a tensor with one row of the target's logits for each node"
        )
    if any(len(distribution) != logits.shape[1] for distribution in tree.distributions.values()):
        raise InputError(f"the tree's distributions are not over {logits.shape[1]} tokens, as the logits: pad or cut")
    if isinstance(seed, bool) or not isinstance(seed := plain(seed), int):
        raise InputError(f"seed={seed!r:.60}: give one whole number")
    rule = chosen_verifier(verifier, tree.kind)
    ids = [*plain(prefix), int(tree.tokens[0])]
    check_ids([ids], logits.shape[1])
    settings = resolve(GenerationConfig(), vocab_size=logits.shape[1], **options)
    row = Row(0, ids, settings, 1, seed, logits.device)
    with torch.inference_mode():
        return rule.verify(tree, target_views([row], [tree], [logits])[0])
