"""What the engine asks of drafts: base classes, whose hooks all have defaults.  Trees grow here, and nowhere else.

Knows: prompts, noise, processors, the target's hidden states.
Does not know: any draft, the target, verification, text.

A `Draft` holds what lasts (weights, tokenizer).  `Draft.open` starts a `DraftSession` for one batch of rows.  After
every step the session is told which tokens each row committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.engine.gumbel import Coupling
from specinfer.engine.prefixes import Cached
from specinfer.engine.processors import Processors
from specinfer.errors import CHECK_WEIGHTS, InputError, NumericalError, TreeError
from specinfer.tree import Forest, Growth, Policy, Source, TokenTree

Committed = Sequence[Sequence[int] | None]  # per row, what a step committed; None: the row retires
States = Sequence[Tensor | None]  # per row, the target's auxiliary hidden states (n, K, H)


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
    # per row, the target's hidden states (n, aux_layers, H) at all prompt tokens except the root, or without the first
    # ones, if the draft has read them: it needs those from the last token on that `known` and the prompt have in common
    states: States = ()
    known: Sequence[Cached | None] = ()  # per row, what a session of the draft's owner has read of a text like it
    graphs: bool = False  # replay passes as CUDA graphs
    notes: Sequence[list[str]] = ()  # per row, what its result will say: sessions may add to it
    predicted: Sequence[Sequence[int]] = ()  # per row, a text that the row's may repeat; none if it is empty


class Scored(Protocol):
    """One row of a step: the tree, and what the target said at its nodes."""

    @property
    def tree(self) -> TokenTree:
        """The tree, N nodes."""

    @property
    def logits(self) -> Tensor:
        """The target's logits after each node, before processors: (N, V), on its device; read, never kept."""


class DraftSession(ABC):
    """One draft at work on one batch of rows, with its clocks.

    Attributes:
        passes: forward passes so far, prefill excluded.
        seconds: wall-clock seconds in those passes.
        prefill_seconds: wall-clock seconds in prefill passes.
        first_passes: how many passes took longer so far than others of their shapes will.
        limit: how many tokens the draft's context has; None if it has no end.
    """

    passes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_passes: int = 0
    limit: int | None = None

    def source(self, roots: Sequence[int]) -> Source | None:
        """Return what a policy may ask in this step; None: nothing is known, and no row gets a tree.

        Args:
            roots: each row's last committed token.
        """
        return None

    def levels_left(self) -> Sequence[int]:
        """Return, per row, for how many levels of a tree the draft can propose tokens; (): for any number."""
        return ()

    def grow(self, policy: Policy, source: Source, depth: int) -> Growth:
        """Return what a policy grows on the source, no deeper than this."""
        return policy.grow(source, depth)

    def grown(self, growth: Growth, *beside: Tensor) -> tuple[Growth, list[Tensor]]:
        """Bring what a policy grew on the source to the host, and other tensors: see `Growth.to_host`."""
        return growth.to_host(*beside)

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return one tree per row: what the policy grows on the source, as deep as the draft reaches.

        Trees in order stay on their device until somebody looks at nodes; what is wrong with them is seen then.  A
        draft whose trees are not grown overrides this.

        Args:
            policy: how trees grow.
            roots: each row's last committed token.
            max_depth: of the trees.

        Raises:
            NumericalError: what was grown is no tree.
        """
        left = self.levels_left()
        depth = min(max_depth, max(left, default=max_depth))
        source = self.source(roots) if depth > 0 else None
        if source is None:
            return Forest(policy.kind, roots)
        with _proposing(source.draft):
            growth = self.grow(policy, source, depth)

        @_proposing(source.draft)
        def read(*beside: Tensor) -> tuple[Forest, list[Tensor]]:
            on_host, found = self.grown(growth, *beside)
            return on_host.trees(roots, source.draft), found

        trees = Forest(growth.kind, roots, None, growth.slots, read) if growth.slots else read()[0]
        return trees if min(left, default=depth) >= depth else trees.pruned([max(0, levels) for levels in left])

    @abstractmethod
    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take note of what each row committed.

        Args:
            tokens: per row, the accepted path, then the bonus token; None retires the row, and a row of a session with
                a `limit` to which nothing, (), is committed stays as it is.
            states: per row (n, aux_layers, H), the target's hidden states from which those n tokens were chosen; for
                drafts with `aux_layers`.
            scored: per row, retired ones included, what the target said at all nodes, rejected ones included.
        """

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what was read of a row, for a later session to begin with (`DraftContext.known`); None: nothing.

        Args:
            row: its number.
            ids: the row's, those that are not committed yet included.
        """
        return None

    def join(self, other: Self) -> None:
        """Take in the rows of another session of the same draft, after the own ones, between two steps."""
        raise InputError(f"rows cannot join a {type(self).__name__}: generate them in one call, or give it `join`")


@contextmanager
def _proposing(draft: int) -> Iterator[None]:
    """Say which draft's trees are none."""
    try:
        yield
    except (TreeError, NumericalError) as error:
        problem = f"draft {draft} proposed something that is not a tree ({error}), perhaps by NaN logits"
        raise NumericalError(f"{problem}. {CHECK_WEIGHTS}") from error


class Clocked(DraftSession):
    """A session that runs another one, of a draft or of a model, and has its clocks."""

    session: Any

    @property
    def passes(self) -> int:  # type: ignore[override]
        """Forward passes so far, prefill excluded."""
        return int(self.session.passes)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Wall-clock seconds in those passes."""
        return float(self.session.seconds)

    @property
    def prefill_seconds(self) -> float:  # type: ignore[override]
        """Wall-clock seconds in prefill passes."""
        return float(self.session.prefill_seconds)

    @property
    def first_passes(self) -> int:  # type: ignore[override]
        """How many passes took longer so far than others of their shapes will."""
        return int(self.session.first_passes)


class Draft(ABC):
    """Anything that proposes trees: the base class of all drafts, with defaults for everything but `open`.

    Attributes:
        name: in results.
        aux_layers: the target's layers whose hidden states it reads, counted as transformers does.
        notes: what a decoder's results say about it.
        model: the `TreeModel` that it runs; None if it runs none, or not behind a mask.
        agreements: conventions that a published head may have, the one in use first, by agreement with the target.
        is_whole: whether it proposes its trees whole, and no policy may cut them.
        may_wait: whether steps in which nobody asks it may be committed later, as one, without `scored`, and sessions
            of its model be opened when it is asked for the first time.
        by_text: whether what it proposes depends on its row's text alone, unless it `learns`; not on which nodes the
            target scored, nor on other rows.
    """

    name: str
    aux_layers: Sequence[int] = ()
    notes: Sequence[str] = ()
    model: object = None
    agreements: Sequence[tuple[str, list[float]]] = ()
    is_whole: bool = False
    may_wait: bool = False
    by_text: bool = True

    @abstractmethod
    def open(self, context: DraftContext) -> DraftSession:
        """Start drafting for a batch of rows."""

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None) -> Draft:
        """Return the draft that runs for one decoder: a copy bound to its target, or itself.

        Args:
            target: the decoder's.
            tokenizer: the target's, or None.
        """
        return self

    def suited(self, policy: Policy) -> Policy:
        """Return the policy for a decoder with this draft: the given one, or one that suits trees that come whole.

        Raises:
            PolicyError: there is none.
        """
        return policy

    @property
    def owner(self) -> object:
        """Whose caches its sessions write: what they read is kept for drafts of the same owner.  None keeps nothing."""
        return getattr(self.model, "model", self.model)

    @property
    def learns(self) -> bool:
        """Whether there is something to learn: a draft with a `learn` of its own."""
        return type(self).learn is not Draft.learn

    def learn(self, texts: Sequence[Sequence[int]], seconds: float) -> None:  # noqa: B027
        """Learn between calls; what it spends is in the statistics.

        Args:
            texts: ids of each row, prompt and text.
            seconds: that the call took.
        """

    def identity(self) -> dict[str, object]:
        """Return the settings, beside name and weights, that decide what it proposes, JSON-ready."""
        return {}
