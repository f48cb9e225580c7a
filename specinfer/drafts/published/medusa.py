"""Medusa heads: each predicts one depth from the target's last state alone (arXiv 2401.10774, section 2.1).

Knows: the heads' layers, the names of their weights.  Does not know: how trees grow, verification, training.

Head i proposes what stands i + 1 places below the root, whatever stands between.  All read the state that chose the
root, the target's last one after its final norm: there is no cache, no position, and no pass behind a mask.
"""

import re
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from specinfer.drafts.depths import LatticeSession
from specinfer.drafts.published.checkpoint import Checkpoint, assign, renamed
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.network import moved_copy
from specinfer.engine.draft import Committed, DraftContext, Scored, States

PREFIX = "medusa_head."  # of the names in some files
NAMED = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?weight")  # head, and layer or output matrix, whose number is the last


class ResidualBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        """Return states (..., H)."""
        return states + functional.silu(self.linear(states))


class MedusaNetwork(nn.Module):
    """D heads: residual blocks and an output matrix each, named as in published files below ``heads``.

    Args:
        heads: D, how many depths are predicted.
        layers: blocks of each head.
        hidden_size: H, of the target.
        vocab_size: V, of the target.
    """

    def __init__(self, heads: int, layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.target_size, self.vocab_size = hidden_size, vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(hidden_size) for _ in range(layers)), nn.Linear(hidden_size, vocab_size, bias=False)
            )
            for _ in range(heads)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return logits (..., D, V) of depths 1 ... D below the token that each state (..., H) chose."""
        states = states.to(next(self.parameters()).dtype)
        return torch.stack([head(states) for head in self.heads], -2)

    def conventions(self, layers: int) -> list[Convention]:
        """Return the only one: the state after the final norm."""
        return [Convention((layers,))]

    def bound(self, target: PreTrainedModel) -> Self:
        """Return a copy on a target's device and in its dtype; weights that fit as they are, are shared."""
        return moved_copy(self, target)


class MedusaSession(LatticeSession):
    """Medusa heads at work."""

    per_row = (*LatticeSession.per_row, "states")

    def __init__(self, network: MedusaNetwork, aux_layers: Sequence[int], context: DraftContext) -> None:
        super().__init__(context)
        self.network, self.depth = network, len(network.heads)
        self.column = list(context.aux_layers).index(aux_layers[0])
        # per row, the state (H,) that chose the root; a prompt of one token was not chosen
        self.states = [self._newest(states) for states in context.states]

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels can be predicted: all, if a state chose its last token."""
        return [0 if state is None else self.depth for state in self.states]

    def predict(self) -> Tensor:
        """Run the heads on all rows; those without a state count for nothing."""
        started = perf_counter()
        nothing = torch.zeros_like(next(state for state in self.states if state is not None))
        logits: Tensor = self.network(torch.stack([nothing if state is None else state for state in self.states]))
        self.passes += 1
        self.seconds += perf_counter() - started
        return logits

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take the last committed token of each row as its root, and the state that chose it."""
        for row, chose in enumerate(states):
            self.states[row] = self._newest(chose)
        super().commit(tokens, states, scored)

    def _newest(self, states: Tensor | None) -> Tensor | None:
        """Return the last of the states (n, aux_layers, H) that this draft reads, (H,); None if there is none."""
        return None if states is None or not len(states) else states[-1, self.column]


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint says that it is Medusa's."""
    config = checkpoint.config
    return (
        "medusa_num_heads" in config or "medusa" in f"{config.get('model_type')} {config.get('architectures')}".lower()
    )


def load(checkpoint: Checkpoint) -> tuple[MedusaNetwork, type[MedusaSession]]:
    """Read heads; how many there are, and their sizes, is what the weights say, for configurations are often wrong.

    Raises:
        ModelError: weights are missing, unknown or of another shape, or there is no head.
    """
    weights = renamed(checkpoint.weights, lambda name: name.removeprefix(PREFIX))
    heads, layers = _counts(weights)
    output = weights.get(f"0.{layers}.weight")
    if output is None or output.ndim != 2:
        raise checkpoint.refuse(f"it has no head: no matrix is named 0.{layers}.weight, after 0.0.linear.weight ...")
    with torch.device("meta"):
        network = MedusaNetwork(heads, layers, output.shape[1], output.shape[0])
    assign(checkpoint, network, renamed(weights, lambda name: f"heads.{name}"))
    return network, MedusaSession


def _counts(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the numbers of heads and of blocks in a head, by the names of weights."""
    found = [tuple(map(int, named.groups())) for name in weights if (named := NAMED.fullmatch(name))]
    return 1 + max((head for head, _ in found), default=-1), max((layer for _, layer in found), default=0)
