"""The costs of a target pass and of a draft's proposal on this machine: medians over a few real steps.

Knows: the engine and its clocks.  Does not know: texts, traces, what is concluded from costs.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from specinfer.calls.run import Run
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.draft import Committed, Draft, DraftContext, DraftSession
from specinfer.engine.sampling import whole_distribution
from specinfer.tree import BestFirst, Chain, DenseSource, Policy

SIZES = (0, 1, 4, 8, 16, 32, 64)  # drafted nodes of a timed target pass
STEPS, ROUNDS = 4, 2  # a figure is the least of the rounds' medians over steps: interruptions only add


class PassCosts(NamedTuple):
    """Milliseconds of a step without its drafts, by the drafted nodes that its target pass scores."""

    nodes: list[int]  # ascending from 0: the root alone is plain decoding
    target: list[float]  # of the pass, ascending: where a larger pass was faster, its time counts
    rest: list[float]  # of everything else but the drafts

    def step(self, nodes: float) -> float:
        """Return the milliseconds of a step with a number of drafted nodes, linear between the measured sizes."""
        return float(np.interp(nodes, self.nodes, np.add(self.target, self.rest)))


def measured_costs(
    decoder: SpeculativeDecoder, policies: Sequence[Policy], prompt: Sequence[int], max_new_tokens: int
) -> tuple[PassCosts, list[list[float]]]:
    """Time target passes over `SIZES` nodes and the proposals of every draft, in turns.

    Args:
        decoder: its target is timed, with the hidden states that its drafts read, and so are its drafts.
        policies: by which drafts propose.
        prompt: token ids.
        max_new_tokens: after it, at most.

    Returns:
        Costs of passes, up to the largest policy's nodes; and by draft and policy the milliseconds of a proposal.
    """
    filler = _Filler(decoder.target.vocab_size, decoder.aux_layers)
    most = max(policy.max_nodes for policy in policies)
    branching = most > max(policy.max_depth for policy in policies)
    filled = [BestFirst(size, 1) if branching else Chain(size) for size in SIZES if size <= most]
    model, tokenizer = decoder.target.model, decoder.tokenizer
    filling, *alone = [SpeculativeDecoder(model, tokenizer, [draft], Chain(1)) for draft in (filler, *decoder.drafts)]
    jobs: list[tuple[SpeculativeDecoder, Policy]] = [(filling, policy) for policy in filled]
    jobs += [(single, policy) for single in alone for policy in policies]
    figures = np.array([[_figures(*job, prompt, max_new_tokens) for job in jobs] for _ in range(ROUNDS)])
    nodes, target, rest, proposals = figures.min(0).T  # (jobs,) each
    sizes, kept = np.unique(nodes[: len(filled)].astype(int), return_index=True)
    ascending = np.minimum.accumulate(target[kept][::-1])[::-1]
    passes = PassCosts(sizes.tolist(), ascending.tolist(), rest[kept].tolist())
    return passes, proposals[len(filled) :].reshape(len(decoder.drafts), len(policies)).tolist()


def _figures(decoder: SpeculativeDecoder, policy: Policy, prompt: Sequence[int], max_new_tokens: int) -> list[float]:
    """Decode a few steps; return the most nodes of a tree, and medians of a step's parts in milliseconds.

    The parts are the target's pass, the work beside it and the proposal of the one draft.  The first step warms up and
    does not count.
    """
    request = decoder.prepare(list(prompt), **whole_distribution(0, max_new_tokens))
    run = Run([request], single=True, policy=policy)
    parts: list[tuple[int, float, float, float]] = []
    spent, left = 0.0, max_new_tokens
    for ((_, step),) in islice(run, 1 + STEPS):
        if parts and left <= policy.max_depth:
            break  # trees are cut near the end of the text
        before, (_, spent) = spent, request.spent.drafting[0]
        parts.append((step.tree.num_drafted, step.seconds.target, step.seconds.bookkeeping, spent - before))
        left -= len(step.tokens)
    run.close()
    timed = np.array(parts[1:] or parts)
    return [float(timed[:, 0].max()), *(1000 * np.median(timed[:, 1:], axis=0)).tolist()]


class _Filler(Draft, DraftSession):
    """A draft, and its own session, whose trees are as large as the policy allows, and cost nothing."""

    name = "filler"

    def __init__(self, vocab_size: int, aux_layers: Sequence[int]) -> None:
        self.vocab_size, self.aux_layers = vocab_size, tuple(aux_layers)

    def open(self, context: DraftContext) -> "_Filler":
        """Take the draft's number in the trees."""
        self.number = context.draft
        return self

    def source(self, roots: Sequence[int]) -> DenseSource:
        """Return uniform distributions below each row's last token."""
        return DenseSource(
            lambda frontier: torch.zeros(*frontier.tokens.shape, self.vocab_size, dtype=torch.float32, device="cpu"),
            len(roots),
            draft=self.number,
        )

    def commit(self, tokens: Committed, states: Sequence[object] = (), scored: Sequence[object] = ()) -> None:
        """Keep nothing."""
