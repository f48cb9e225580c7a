"""The draft interface: what proposes token trees, and what it is told.

Knows: prompts, noise, processors, the target's hidden states.  Does not know: the target, verification, text.

A `Draft` holds what lasts (weights, tokenizer).  `Draft.open` starts a `DraftSession` for one batch of rows.  After
every step the session is told which tokens each row committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specinfer.engine.gumbel import Coupling
from specinfer.engine.sampling import Processors
from specinfer.tree import Policy, TokenTree


@dataclass(frozen=True)
class DraftContext:
    """What a draft is told about the rows it will draft for."""

    prompts: Sequence[Sequence[int]]  # token ids; the last one is the root of the first tree
    capacity: int  # cache slots per row at first, for prompt and tree
    max_capacity: int  # ... and at most
    vocab_size: int  # of the target: distributions have this length
    draft: int  # this draft's id in the trees
    processors: Processors  # the target's, without those that read the prefix
    seeds: Sequence[int]  # per row
    couplings: Sequence[Coupling] = ()  # per row, the target's noise: it chooses argmax(log p + noise); () = none
    aux_layers: Sequence[int] = ()  # the target's layers whose hidden states drafts get, counted as transformers does
    # per row, the target's hidden states (n - 1, aux_layers, H) at all prompt tokens except the root
    states: Sequence[Tensor | None] = ()
    graphs: bool = False  # replay passes as CUDA graphs
    notes: Sequence[list[str]] = ()  # per row, what its result will say: sessions may add to it


class Scored(Protocol):
    """One row of a step: the tree, and what the target said at its nodes."""

    @property
    def tree(self) -> TokenTree:
        """The tree, N nodes."""

    @property
    def logits(self) -> Tensor:
        """The target's logits after each node, before processors: (N or more, V), on its device; read, never kept."""


class Proposer(Protocol):
    """What the decode loop needs of a draft at work on one batch of rows."""

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow one tree per row below its last committed token, no deeper than ``max_depth``."""

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Take note of what each row committed.

        Args:
            tokens: per row, the accepted path, then the bonus token; None retires the row.
            states: per row (n, aux_layers, H), the target's hidden states from which those n tokens were chosen; for
                drafts with `aux_layers`.
            scored: per row, retired ones included, what the target said at all nodes, rejected ones included.
        """


class DraftSession(Proposer, Protocol):
    """One draft at work on one batch of rows, with its clocks."""

    def join(self, other: Any) -> None:
        """Take in the rows of another session of the same draft, after the own ones, between two steps."""

    @property
    def passes(self) -> int:
        """Forward passes so far, prefill excluded."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds in those passes."""

    @property
    def prefill_seconds(self) -> float:
        """Wall-clock seconds in prefill passes."""


@runtime_checkable
class BoundedSession(DraftSession, Protocol):
    """A session of a draft whose context may end.  A row that is committed nothing, (), stays as it is."""

    @property
    def limit(self) -> int | None:
        """How many tokens the draft's context has; None if it has no end."""

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels of a tree fit into the draft's context; 0 or less: none."""


class Draft(Protocol):
    """Anything that proposes trees.

    A draft that reads the target's hidden states names their layers in ``aux_layers``.  It has a method ``attach`` that
    takes the target and its tokenizer and returns the draft to run: a bound copy, or None for itself.
    A draft that proposes its trees whole has a method ``suited``, which takes the decoder's policy and returns one that
    suits such trees, or raises `PolicyError`.
    A draft that learns between calls has a method ``learn``, which takes the ids of each row (prompt and text) and the
    seconds that the call took.  What it spends is in the statistics.
    """

    name: str

    def open(self, context: DraftContext) -> DraftSession:
        """Start drafting for a batch of rows."""
