"""One sequence being decoded: its ids, its distribution, its random numbers, and when it ends.

Knows: everything that belongs to one row and to no other, so a row in a batch behaves as it does alone.
Does not know: models, caches, drafts, the other rows.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

import torch

from specinfer.engine.gumbel import Coupling
from specinfer.engine.sampling import GenerationSettings, Processors
from specinfer.engine.stopping import Stopping
from specinfer.engine.verify import Verdict
from specinfer.results import Step, drafted_by
from specinfer.tree import TokenTree


class Scored(Protocol):
    """The target at the nodes of a row's tree (`target_view.RowView`)."""

    def probability(self, node: int, token: int) -> float:
        """Return the probability of a token after a node, with the row's processors."""

    def log_probabilities(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities, without processors, of a token after each of some nodes."""


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
        logprobs: whether steps keep the log-probabilities of their tokens.
        note: for the result, what was decided about its prompt; or nothing.
        stopping: makes what ends the row; called as `Stopping`.

    Attributes:
        notes: for the result.

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
        tokenizer: Any = None,
        draft_names: Sequence[str] = (),
        gate: float | None = None,
        processors: Processors | None = None,
        logprobs: bool = False,
        note: str = "",
        stopping: Callable[..., Stopping] = Stopping,
    ) -> None:
        self.index, self.seed, self.sampling, self.draft_names = index, seed, settings.do_sample, draft_names
        self.contrast, self.coupling, self.options = settings.contrast, Coupling(seed), settings.sampling
        self.processors = processors or Processors.of(settings, len(prompt), device)
        self.stopping = stopping(settings, budget, device, tokenizer, self.processors.padding)
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.step = 0
        self.logprobs, self.notes = logprobs, [note] if note else []
        self.gate, self.confident = gate, True  # whether the last token passed the gate; a prompt's does
        self.finished: str | None = None  # "eos", "stop" or "length"; or whoever takes the row back says why

    @property
    def remaining(self) -> int:
        """How many tokens the row may still emit."""
        return self.stopping.budget - (len(self.ids) - self.prompt_length)

    @property
    def max_depth(self) -> int:
        """How deep the next tree may be: one level less than the row may emit, and a bare root below the gate.

        A row that was taken back has a bare root, too, in the step that it leaves with.
        """
        return self.remaining - 1 if self.confident and not self.finished else 0

    def advance(self, tree: TokenTree, verdict: Verdict, target: Scored) -> Step:
        """Append the verdict's tokens one by one until the text ends; return the step.

        Args:
            tree, verdict: what was verified.
            target: at the tree's nodes.
        """
        if self.finished:  # it was taken back between two steps
            return Step(tree, (), (), ())
        before = len(self.ids)
        if self.gate is not None:
            self.confident = target.probability((0, *verdict.path)[-1], verdict.token) >= self.gate
        for token in (*(int(tree.tokens[node]) for node in verdict.path), verdict.token):
            self.ids.append(token)
            self.finished = self.stopping.reason(self.ids, len(self.ids) - self.prompt_length)
            if self.finished:
                break
        self.coupling.forget(inf if self.finished else len(self.ids))
        tokens = tuple(self.ids[before:])
        proposers = drafted_by(tree, verdict.path, self.draft_names, len(tokens))
        record = tree.without_distributions() if tree.distributions else tree  # they are large and no longer needed
        nodes = (0, *verdict.path)[: len(tokens)]  # before each token
        logprobs = tuple(target.log_probabilities(nodes, tokens)) if self.logprobs else None
        return Step(record, verdict.path, tokens, proposers, logprobs=logprobs)
