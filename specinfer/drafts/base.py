"""The draft interface: what proposes token trees, and what it is told.

Knows: prompts, noise, processors, the target's hidden states.  Does not know: the target, verification, text.

A `Draft` is the thing itself (weights, tokenizer); `Draft.open` starts a `DraftSession` for one batch of rows.  After
every step a session is told which tokens each row committed; how it keeps up with them is the session's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specinfer.engine.gumbel import DRAFT, Coupling, key
from specinfer.engine.sampling import Processors
from specinfer.tree import Policy, TokenTree, draw_candidates


@dataclass(frozen=True)
class DraftContext:
    """What a draft is told about the rows it will draft for."""

    prompts: Sequence[Sequence[int]]  # token ids; the last one is the root of the first tree
    capacity: int  # slots per row to begin with, prompt and tree included
    max_capacity: int  # ... and at most
    vocab_size: int  # of the target: distributions have this length
    draft: int  # this draft's id in the trees
    processors: Processors  # the target's distribution without its prefix-reading processors
    seeds: Sequence[int]  # per row
    couplings: Sequence[Coupling] = ()  # per row, the target's own noise: it chooses by argmax(log p + noise); or none
    aux_layers: Sequence[int] = ()  # hidden states that the target hands out, as transformers counts layers
    states: Sequence[
        Tensor | None
    ] = ()  # per row (n - 1, aux_layers, H): the target's, at all prompt tokens but the root
    graphs: bool = False  # replay passes as CUDA graphs


class Proposer(Protocol):
    """What the decode loop needs of a draft at work on one batch of rows."""

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow one tree per row below its last committed token, no deeper than ``max_depth``."""

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[Tensor | None] = ()) -> None:
        """Take note of what each row committed.

        Args:
            tokens: per row, the accepted path, then the bonus token; None retires the row.
            states: per row (n, aux_layers, H), the target's hidden states from which those n tokens were chosen; for
                drafts with `aux_layers`.
        """


class DraftSession(Proposer, Protocol):
    """One draft at work on one batch of rows, with its clocks."""

    @property
    def passes(self) -> int:
        """Forward passes so far, prefill excluded."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds in those passes."""

    @property
    def prefill_seconds(self) -> float:
        """Wall-clock seconds in prefill passes."""


class Draft(Protocol):
    """Anything that proposes trees.

    A draft that reads the target's hidden states names them in ``aux_layers`` and is given the target by ``attach``,
    which
    returns the draft to run: a bound copy, or None for itself.
    """

    name: str

    def open(self, context: DraftContext) -> DraftSession:
        """Start drafting for a batch of rows."""


def keep_rows(survivors: Sequence[int], *per_row: list[Any]) -> None:
    """Drop what belongs to rows that were retired from lists with an entry per row; empty ones stay empty."""
    for values in per_row:
        values[:] = [values[i] for i in survivors if values]


def coupling_noise(
    couplings: Sequence[Coupling], lengths: Sequence[int], depth: int, vocab_size: int, device: torch.device
) -> Tensor:
    """Return the target's own Gumbel noise (B, V) of what follows nodes at this depth."""
    rows = zip(couplings, lengths, strict=True)
    return torch.stack([noise.at(length + depth, vocab_size, device) for noise, length in rows])


def row_generators(
    seeds: Sequence[int], draft: int, lengths: Sequence[int], depth: int, device: torch.device
) -> list[torch.Generator]:
    """Return each row's chance for one level of one draft: it depends on the row's seed and length, on no other row."""
    keys = [key(seed, DRAFT, draft, length, depth) for seed, length in zip(seeds, lengths, strict=True)]
    return [torch.Generator(device).manual_seed(own) for own in keys]


def draw_rows(
    log_probs: Tensor, k: int, replacement: bool, chance: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw for each row of (B, W, V) from its own generator: see `tree.draw_candidates`."""
    rows = [draw_candidates(row, k, replacement, own) for row, own in zip(log_probs, chance, strict=True)]
    tokens, values, distributions = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, values, distributions
