"""Hypothesis strategies and made-up distributions that the tests share.

Everything is derandomised: a test that passes once passes always.  Import as `from strategies import ...`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from specinfer.tree import DenseSource, Draw, Frontier, Kind, TokenTree

VOCAB = 6  # of the trees that `token_trees` makes
PROPERTY = settings(derandomize=True, deadline=None, max_examples=120)
DIGITS = (12, VOCAB, 6, 3, 34)  # a node's parent, token, draft, place among its draft's draws, and loss of score
NODES, SIZES, ROOTS = (st.integers(0, last) for last in (math.prod(DIGITS) - 1, 12, VOCAB - 1))
KINDS = st.sampled_from(list(Kind))


@st.composite
def node_lists(
    draw: st.DrawFn, kind: Kind | None = None, drafts: Sequence[int] = (0,), root: int | None = None
) -> dict[str, Any]:
    """Arguments of `TokenTree.from_nodes`: nodes in topological order, some with the same path.

    A node is one integer, and what it is are its digits: to draw them one by one takes most of a test's time.
    """
    size = draw(SIZES)
    digits = np.unravel_index([draw(NODES) for _ in range(size)], DIGITS) if size else np.zeros((5, 0), int)
    choice, tokens, drawn_by, indices, steps = (own.tolist() for own in digits)
    parents = [own % (i + 1) for i, own in enumerate(choice)]
    scores: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        scores.append((scores[parent - 1] if parent else 0.0) - 4 * step / (DIGITS[-1] - 1))
    draws = [(Draw(drafts[own % len(drafts)], index),) for own, index in zip(drawn_by, indices, strict=True)]
    kind = kind or draw(KINDS)
    distributions = {(p, d.draft): law_of(d.draft) for p, (d,) in zip(parents, draws, strict=True)}
    return {
        "root": draw(ROOTS) if root is None else root,
        "tokens": tokens,
        "parents": parents,
        "scores": scores,
        "draws": draws,
        "distributions": {} if kind is Kind.RANKED else distributions,
        "kind": kind,
    }


def token_trees(**options: Any) -> st.SearchStrategy[TokenTree]:
    """Trees of up to 12 drafted nodes; options as of `node_lists`."""
    return node_lists(**options).map(lambda nodes: TokenTree.from_nodes(**nodes))


def law_of(draft: int) -> np.ndarray:
    """The distribution (VOCAB,) that a draft of `node_lists` pretends to draw from."""
    weights = np.arange(1, VOCAB + 1) + draft
    return weights / weights.sum()


class TableSource(DenseSource):
    """B rows of made-up languages: a node's distribution is that of its state, which hashes the whole path.

    It finds a node's state through `Frontier.parents` only, so it also tests what policies send.

    Args:
        table: (B, S, V) log-probabilities by row and state.
        generator: for draws.
    """

    def __init__(self, table: Tensor, generator: torch.Generator | None = None) -> None:
        super().__init__(self._look_up, len(table), generator, table.device)
        self.table = table
        self.states = torch.zeros(self.batch, 0, dtype=torch.int64, device=table.device)
        self.frontiers: list[Frontier] = []

    def _look_up(self, frontier: Frontier) -> Tensor:
        assert frontier.depth == len(self.frontiers), "policies go down one level at a time"
        self.frontiers.append(frontier)
        if frontier.depth == 0:
            states = torch.zeros_like(frontier.tokens)
        else:
            states = next_state(self.states.gather(1, frontier.parents), frontier.tokens, self.table.shape[1])
        self.states = torch.cat((self.states, states), 1)
        rows = torch.arange(self.batch, device=states.device)[:, None]
        return self.table[rows, states]


def next_state(state: Any, token: Any, states: int) -> Any:
    """The state after a token: ints or tensors."""
    return (5 * state + token + 1) % states


def coarse_table(rows: int, states: int, vocab: int, seed: int) -> Tensor:
    """A (rows, states, vocab) table of float64 log-probabilities full of exact ties, ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, states, vocab)
    if seed % 2:  # whole numbers add up exactly, so unlike paths tie; 0 makes a child tie with its parent
        log_probs = -torch.randint(0, 4, shape, generator=generator).double()
        return log_probs.masked_fill(log_probs == -3, -torch.inf)
    counts = torch.randint(0, 4, shape, generator=generator).double()
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).log()
