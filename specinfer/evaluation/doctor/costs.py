"""What a target pass and a draft's proposal cost on this machine: medians over a few real steps.

Knows: the engine and its clocks.  Does not know: texts, traces, what is concluded from costs.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from specinfer.decoder import SpeculativeDecoder
from specinfer.drafts.base import Draft, DraftContext
from specinfer.engine.sampling import whole_distribution
from specinfer.results import Step
from specinfer.tree import BestFirst, DenseSource, Policy, TokenTree

SIZES = (0, 1, 4, 8, 16, 32, 64)  # drafted nodes of a timed target pass
STEPS = 6  # that a median is over


class PassCosts(NamedTuple):
    """Milliseconds of a step without its drafts, by the drafted nodes that its target pass scores."""

    nodes: list[int]  # ascending from 0: the root alone is plain decoding
    target: list[float]  # of the pass
    rest: list[float]  # of everything else but the drafts

    def step(self, nodes: float) -> float:
        """Return the milliseconds of a step with so many drafted nodes, between the measured sizes on a line."""
        return float(np.interp(nodes, self.nodes, np.add(self.target, self.rest)))


def pass_costs(decoder: SpeculativeDecoder, prompt: Sequence[int], max_new_tokens: int) -> PassCosts:
    """Time steps whose trees have `SIZES` nodes, as far as the target's vocabulary and attention allow.

    Args:
        decoder: its target is timed, with the hidden states that its drafts read.
        prompt: token ids.
        max_new_tokens: after it, at most.
    """
    filler = _Filler(decoder.target.vocab_size, decoder.aux_layers)
    figures: dict[int, list[float]] = {}  # nodes -> milliseconds of the pass and of the rest
    for size in SIZES:
        steps = [step for step, _ in _steps(decoder, filler, BestFirst(size, 1), prompt, max_new_tokens)]
        seconds = np.array([(step.seconds.target, step.seconds.bookkeeping) for step in steps])
        figures[max(step.tree.num_drafted for step in steps)] = (1000 * np.median(seconds, axis=0)).tolist()
    nodes = sorted(figures)
    target, rest = map(list, zip(*(figures[size] for size in nodes), strict=True))
    return PassCosts(nodes, target, rest)


def proposal_costs(
    decoder: SpeculativeDecoder, draft: Draft, policies: Sequence[Policy], prompt: Sequence[int], max_new_tokens: int
) -> list[float]:
    """Return the milliseconds of a draft's proposal by policy; arguments as `pass_costs`."""
    timed = [_steps(decoder, draft, policy, prompt, max_new_tokens) for policy in policies]
    return [1000 * float(np.median([seconds for _, seconds in steps])) for steps in timed]


def _steps(
    decoder: SpeculativeDecoder, draft: Draft, policy: Policy, prompt: Sequence[int], max_new_tokens: int
) -> list[tuple[Step, float]]:
    """Decode a few steps; return each with the seconds of its proposal.  The first one warms up and is left out."""
    alone = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, [draft], policy)
    run = alone.open(list(prompt), max_new_tokens=max_new_tokens, **whole_distribution(0))
    steps: list[tuple[Step, float]] = []
    spent, left = 0.0, max_new_tokens
    for ((_, step),) in islice(run, 1 + STEPS):
        if steps and left <= policy.max_depth:
            break  # trees are cut near the end of the text
        before, (_, spent) = spent, run.drafting[0]
        steps.append((step, spent - before))
        left -= len(step.tokens)
    run.close()
    return steps[1:] or steps


class _Filler:
    """A draft whose trees are as large as the policy allows, and cost nothing."""

    name = "filler"

    def __init__(self, vocab_size: int, aux_layers: Sequence[int]) -> None:
        self.vocab_size, self.aux_layers = vocab_size, tuple(aux_layers)

    def attach(self, *_: object) -> None:
        """It reads no state."""

    def open(self, context: DraftContext) -> "_FillerSession":
        """Start with the rows' last tokens."""
        return _FillerSession(self.vocab_size, context)


class _FillerSession:
    """Uniform distributions below each row's last token."""

    passes, seconds, prefill_seconds = 0, 0.0, 0.0

    def __init__(self, vocab_size: int, context: DraftContext) -> None:
        self.draft, self.vocab_size = context.draft, vocab_size
        self.roots = [prompt[-1] for prompt in context.prompts]

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow by the policy."""
        source = DenseSource(lambda frontier: torch.zeros(*frontier.tokens.shape, self.vocab_size), len(self.roots))
        return policy.grow(source, max_depth).trees(self.roots, self.draft)

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[object] = ()) -> None:
        """Go on from the last tokens."""
        self.roots = [new[-1] for new in tokens if new is not None]
