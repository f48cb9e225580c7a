"""One sequence being decoded: its ids, its random numbers, the target at its tree's nodes, and when its text ends.

Knows: everything that belongs to one row and to no other, so a row in a batch behaves as it does alone.
Does not know: models, caches, drafts, which nodes verification visits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, isfinite
from time import monotonic
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from transformers import MaxTimeCriteria, PreTrainedTokenizerBase, StopStringCriteria

from specinfer.common.ranks import ALONE, Ranks
from specinfer.common.tensors import fetched, on_device
from specinfer.engine.constraint import Constraint
from specinfer.engine.gumbel import COIN, SILENT, Coupling, key, uniform
from specinfer.engine.processors import Processors, with_custom
from specinfer.engine.sampling import GenerationSettings
from specinfer.engine.stop_strings import StopStrings
from specinfer.engine.store import Text
from specinfer.engine.verify import Probabilities, Verdict
from specinfer.errors import CHECK_WEIGHTS, NoTokenLeft, NumericalError, SamplingError
from specinfer.results import UNFINISHED, Step, drafted_by
from specinfer.tree import Forest, Slots, TokenTree

NOTHING = -1  # in place of a bonus token that options leave no room for

Choice = tuple[int, float]  # a token, and its score with noise


class Stopping:
    """Decides, token by token, whether a row's text has ended, and why.

    Args:
        settings: of the call.
        budget: new tokens at most.
        device: of the ids that criteria are given.
        tokenizer: needed for ``stop_strings`` only.
        padding: ids that criteria see before the row's ids, as `Processors`.

    Raises:
        SamplingError: ``stop_strings`` without a tokenizer.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        budget: int,
        device: torch.device | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        padding: Sequence[int] = (),
    ) -> None:
        self.eos, self.budget, self.device, self.padding = settings.eos, budget, device, padding
        self.criteria = with_custom([], settings.criteria)
        if settings.stop_strings and tokenizer is None:
            raise SamplingError("stop_strings needs a tokenizer: construct the decoder with one")
        # a criterion of the caller replaces what options ask for, as in transformers
        has_strings, has_clock = (
            any(type(criterion.function) is kind for criterion in self.criteria)
            for kind in (StopStringCriteria, MaxTimeCriteria)
        )
        asked = bool(settings.stop_strings) and not has_strings
        self.strings = StopStrings(tokenizer, settings.stop_strings) if asked else None
        self.seconds = None if has_clock else settings.config.max_time
        self.deadline = inf
        self.differs = bool(settings.criteria) or self.seconds is not None  # between processes, perhaps
        self.ranks = ALONE

    def begin(self, ranks: Ranks = ALONE) -> None:
        """Start the clock of ``max_time``.

        Args:
            ranks: the processes that decode this text; if one of them would stop, all do.
        """
        self.ranks = ranks
        self.deadline = inf if self.seconds is None else monotonic() + self.seconds

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return "eos", "stop" or "length" if the text ends with the last id, else None."""
        if ids[-1] in self.eos:
            return "eos"
        stops = monotonic() > self.deadline or (self.strings is not None and self.strings.find(ids) is not None)
        if self.criteria:
            tensor = torch.tensor([[*self.padding, *ids]], device=self.device)
            stops = any(criterion.stops(tensor) for criterion in self.criteria) or stops
        if self.differs:
            stops = any(self.ranks.largest([stops]))
        if stops:
            return "stop"
        return "length" if new_tokens >= self.budget else None


class Row:
    """A sequence under way.

    Args:
        index: of the sequence in the caller's batch.
        prompt: token ids, at least one.
        settings: of the call.
        budget: new tokens at most.
        seed: of its noise.
        device: of the target's logits.
        tokenizer: needed for stop strings only.
        draft_names: by draft id.
        gate: draft nothing after a token to which the target gave a smaller probability; None = always draft.
        processors: from logits to scores; None = those of the settings.
        logprobs: how many of the likeliest tokens steps keep beside each of theirs, with log-probabilities; None
            keeps none.
        predicted: a text that the row's may repeat.
        note: for the result, what was decided about its prompt; or nothing.
        stopping: makes what ends the row; called as `Stopping`.
        salt: rows with the same one may share what is read.

    Attributes:
        notes: for the result.
        text: its tokens, as stores see them.
        error: what ended it, if something of its own failed.

    Raises:
        SamplingError: stop strings without a tokenizer, or an option that a processor refuses.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        settings: GenerationSettings,
        budget: int,
        seed: int,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_names: Sequence[str] = (),
        gate: float | None = None,
        processors: Processors | None = None,
        logprobs: int | None = None,
        predicted: Sequence[int] = (),
        note: str = "",
        stopping: Callable[..., Stopping] = Stopping,
        salt: str = "",
    ) -> None:
        self.index, self.seed, self.sampling, self.draft_names = index, seed, settings.do_sample, draft_names
        self.contrast, self.coupling, self.options = settings.contrast, Coupling(seed), settings.sampling
        self.processors = processors or Processors.of(settings, len(prompt), device)
        self.stopping = stopping(settings, budget, device, tokenizer, self.processors.padding)
        self.ids = list(prompt)
        self.text = Text(self.ids, salt)
        self.error: Exception | None = None
        self.prompt_length = len(prompt)
        self.predicted, self.step = predicted, 0
        self.logprobs, self.notes = logprobs, [note] if note else []
        self.gate, self.confident = gate, True  # whether the last token passed the gate; a prompt's does
        self.finished: str | None = None  # "eos", "stop" or "length"; or whoever takes the row back says why

    @property
    def constraint(self) -> Constraint | None:
        """The grammar that the text follows, if any."""
        return self.processors.constraint

    @property
    def remaining(self) -> int:
        """How many tokens the row may still emit."""
        return self.stopping.budget - (len(self.ids) - self.prompt_length)

    @property
    def max_depth(self) -> int:
        """How deep the next tree may be: one level less than the row may emit, and a bare root below the gate.

        A row that was taken back also has a bare root in the step that it leaves with.
        """
        return self.remaining - 1 if self.confident and not self.finished else 0

    def advance(self, verify: Callable[[TokenTree, "RowView"], Verdict], target: "RowView") -> Step:
        """Append the tokens of a verdict one by one until the text ends; return the step.

        What fails here is the row's own, such as a processor: the row ends with the error, and others go on.

        Args:
            verify: gives the verdict on the tree.
            target: at the tree's nodes.
        """
        if not self.finished:  # else it was taken back between two steps
            try:
                return self._advanced(target.verdict(verify), target)
            except Exception as error:
                self.fail(error)
        return Step(target.tree, (), (), ())

    def fail(self, error: Exception) -> None:
        """End with an error, and keep nothing of what was read; raise it if other processes may not know of it."""
        if self.stopping.ranks.size > 1:
            raise error
        self.error, self.finished, self.text.salt = error, UNFINISHED, None

    def _advanced(self, verdict: Verdict, target: "RowView") -> Step:
        """Append a verdict's tokens; return the step."""
        tree, before = target.tree, len(self.ids)
        if self.gate is not None and verdict.token != NOTHING:
            self.confident = target.probability((0, *verdict.path)[-1], verdict.token) >= self.gate
        for token in (*(int(tree.tokens[node]) for node in verdict.path), verdict.token):
            if token == NOTHING:
                self.finished = UNFINISHED
                break
            self.ids.append(token)
            self.finished = self.stopping.reason(self.ids, len(self.ids) - self.prompt_length)
            if self.finished:
                self.error = None  # it ended before
                break
        if self.sampling:
            self.coupling.forget(inf if self.finished else len(self.ids))
        tokens = tuple(self.ids[before:])
        proposers = drafted_by(tree, verdict.path, self.draft_names, len(tokens))
        record = tree.without_distributions() if tree.distributions else tree  # they are large and no longer needed
        nodes = (0, *verdict.path)[: len(tokens)]  # before each token
        step = Step(record, verdict.path, tokens, proposers)
        if self.logprobs is None or not tokens:
            return step
        found = log_distributions(target.logits[on_device(nodes, target.logits.device)])
        top = likeliest(found, self.logprobs) if self.logprobs else None
        return replace(step, logprobs=tuple(of_tokens(found, tokens)), top_logprobs=top)


def target_views(rows: Sequence[Row], trees: Forest, logits: Sequence[Tensor]) -> list["RowView"]:
    """Return a view of the target for every row's tree, from its logits (N, V).

    Trees that are still on a device come to the host together with the target's choices, unless a row reads paths.
    """
    for row in rows:
        row.step += 1
    slots = trees.slots
    chosen: Iterator[Choice] = iter(())
    if slots and not any(row.processors.reads_path for row in rows):
        chosen = _choices(_noisy_on_device(rows, slots, logits), trees.fetched)
    views = [RowView(*row) for row in zip(rows, trees, logits, strict=True)]
    step = [ref(view) for view in views]
    for view in views:
        view.step = step
    for view in views if slots else ():  # padding has logits as well
        view._chosen.update(zip(range(len(view.logits)), chosen, strict=False))
        view.logits = view.logits[: len(view.tree)]
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
        self._chosen: dict[int, Choice] = {}  # by node, the target's
        self._scores: dict[int, Tensor] = {}  # by node, what may be processed only once
        self._empty = 0  # the node after which nothing may follow, if there is one

    @cached_property
    def coins(self) -> int:
        """The key of the row's coins and draws in this step."""
        return key(self.row.seed, COIN, self.base)

    def verdict(self, verify: Callable[[TokenTree, "RowView"], Verdict]) -> Verdict:
        """Return the verdict on the tree; where no token is left, its row ends after what was accepted."""
        try:
            return verify(self.tree, self)
        except NoTokenLeft as error:
            self.row.error = error
            return Verdict(tuple(self.tree.ancestors(self._empty)[1:]), NOTHING)

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
            NoTokenLeft: nothing is left of them.
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
            if self.row.constraint and isfinite(float(self.logits[node].max())):
                self._empty = node
                raise NoTokenLeft(f"{where}: {self.row.constraint.problem}")
            length = self.base + int(self.tree.depths[node])
            raise NumericalError(
                f"{where}: the target's logits after {length} tokens are NaN, infinite or all -inf. {CHECK_WEIGHTS}"
            )


def log_distributions(logits: Tensor) -> Tensor:
    """Return the natural logarithms of the target's own probabilities, without processors, from logits (T, V)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def of_tokens(distributions: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probabilities of T tokens, under the distributions (T, V) that choose them."""
    return distributions.gather(1, on_device(tokens, distributions.device)[:, None])[:, 0].tolist()


def likeliest(distributions: Tensor, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return, per distribution of (T, V), the likeliest tokens with their log-probabilities, the likeliest first."""
    values, tokens = distributions.topk(min(count, distributions.shape[1]))
    return tuple(tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True))


def _choose(wanted: Sequence[tuple[RowView, Sequence[int]]]) -> None:
    """Store in views the target's choices after some of their nodes."""
    noisy = [view.noisy(nodes) for view, nodes in wanted]
    chosen = _choices(torch.cat(noisy) if len(noisy) > 1 else noisy[0])
    for view, nodes in wanted:
        view._chosen.update(zip(nodes, chosen, strict=False))


def _choices(noisy: Tensor, fetch: Callable[..., list[Tensor]] = fetched) -> Iterator[Choice]:
    """Return what is chosen by scores + noise (N, V), with one transfer from the device."""
    if noisy.device.type == "cpu":  # where torch's maximum is slower than numpy's
        return iter([(token := int(scores.argmax()), float(scores[token])) for scores in noisy.numpy()])
    largest, tokens = (found.tolist() for found in fetch(*noisy.max(-1)))
    return zip(tokens, largest, strict=True)


def _noisy_on_device(rows: Sequence[Row], slots: Slots, logits: Sequence[Tensor]) -> Tensor:
    """Return scores + noise (B n, V) after nodes that are on a device.

    Args:
        rows: B of them, whose processors read no paths.
        slots: of their trees.
        logits: (n, V) of each row's nodes and padding.
    """
    each = [row.processors.scores(values, ()) for row, values in zip(rows, logits, strict=True)]
    scores = torch.cat(each) if len(each) > 1 else each[0]
    if not any(row.sampling for row in rows):
        return scores
    (size, vocab), device, count = each[0].shape, scores.device, 1 + slots.levels
    sources = [(row.coupling if row.sampling else SILENT, len(row.ids)) for row in rows]
    noise = [source.at(first + depth, vocab, device) for source, first in sources for depth in range(count)]
    depths = slots.depths[:, :size, None].expand(-1, -1, vocab)
    return scores + torch.stack(noise).unflatten(0, (-1, count)).gather(1, depths).flatten(0, 1)
