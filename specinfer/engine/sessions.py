"""Sessions of the rows that are decoded together: the target's, and one of each draft.

Knows: what the engine needs of a decoder, how large caches are at first and at most, what prompts share.
Does not know: which rows wait, how a step is decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from specinfer.attention import TreeModel, TreeSession
from specinfer.common.tensors import padded_width
from specinfer.engine.draft import Draft, DraftContext, States
from specinfer.engine.drafting import Drafting
from specinfer.engine.gumbel import SILENT
from specinfer.engine.sequence import Row
from specinfer.engine.shared_prefix import SharedPrefix
from specinfer.engine.verify import ExactMatch, Verifier
from specinfer.tree import Policy

FIRST_TOKENS = 2048  # new tokens that caches hold at first; beyond it they double
FIRST_LEVELS = 8  # levels of a tree that drafts' caches hold at first


class Decoder(Protocol):
    """What the engine needs of a decoder: models, rules, and what was decided about them."""

    target: TreeModel
    drafts: list[Draft]
    policy: Policy
    verifier: Verifier
    tokenizer: Any
    confidence_gate: float | None
    notes: list[str]
    aux_layers: list[int]
    graphs: bool

    @property
    def networks(self) -> list[TreeModel]:
        """Everything that runs passes."""

    @property
    def passes(self) -> str:
        """How passes run, in words."""

    def supported(self, policy: Policy, notes: list[str]) -> Policy:
        """Return the policy, or another one that the models can work on."""


@dataclass
class Openings:
    """How sessions are opened for some rows, and how large."""

    decoder: Decoder
    policy: Policy
    shared: SharedPrefix = field(default_factory=SharedPrefix)

    def target(self, rows: Sequence[Row], joining: bool = False) -> tuple[TreeSession, States]:
        """Read the tokens of rows so far into a session of the target.

        The pass of the next step reads the ends of prompts, beside the trees, if nothing needs their states before, and
        that costs less: where every pass fetches weights, or, beside other rows, where it computes no padding.

        Args:
            rows: the sequences.
            joining: whether they join others for the next step.

        Returns:
            the session, and per row the target's auxiliary hidden states at the tokens that were read.
        """
        model, aux_layers = self.decoder.target, self._aux_layers()
        longest, end = max(len(row.ids) for row in rows), _end(rows)
        drafts = len(self.decoder.drafts)
        usual, most = (count * max(1, drafts) for count, _ in self._tree_sizes())
        # trees of many rows are small, and passes read wide caches more slowly; graphs are lost when a cache grows
        usual = usual if self.decoder.graphs else usual // len(rows)
        first = longest if joining else min(end, longest + FIRST_TOKENS) + padded_width(1 + usual)
        nodes = padded_width(1 + most)
        target = self.shared.open(model, len(rows), first, end + nodes, aux_layers, self.decoder.graphs)
        fetches = model.dispatched and not aux_layers and not model.stateful
        waits = joining and target.run.packs and (not drafts or self.policy.idle)
        return target, self.shared.prefill(target, [list(row.ids[:-1]) for row in rows], hold=fetches or waits)

    def draft(self, number: int, rows: Sequence[Row], states: States) -> Drafting:
        """Open a session of a draft for rows.

        Args:
            number: which.
            rows: the sequences.
            states: per row, the target's auxiliary hidden states at the tokens before the root.
        """
        decoder, end = self.decoder, _end(rows)
        longest = max(len(row.ids) for row in rows)
        (usual, levels), (most, most_levels) = self._tree_sizes()
        sampled = [row for row in rows if row.sampling]
        context = DraftContext(
            prompts=[list(row.ids) for row in rows],
            capacity=min(end, longest + FIRST_TOKENS) + padded_width(1 + usual * min(levels, FIRST_LEVELS)),
            # a row may miss tokens that another has, and all get as many slots; best-first drops some nodes later
            max_capacity=2 * end + padded_width(1 + most * most_levels),
            vocab_size=decoder.target.vocab_size,
            draft=number,
            processors=(sampled or rows)[0].processors.without_prefix_readers(),
            seeds=[row.seed for row in rows],
            couplings=[row.coupling if row.sampling else SILENT for row in rows] if self.coupled(rows) else (),
            aux_layers=self._aux_layers(),
            states=states,
            graphs=decoder.graphs,
            notes=[row.notes for row in rows],
        )
        draft = decoder.drafts[number]
        return Drafting(draft.open(context), context, draft.name, partial(self.draft, number))

    def coupled(self, rows: Sequence[Row]) -> bool:
        """Whether drafts rank by the rows' noise."""
        return isinstance(self.decoder.verifier, ExactMatch) and any(row.sampling for row in rows)

    def _tree_sizes(self) -> list[tuple[int, int]]:
        """Return nodes and levels of a draft's tree, as caches have room for them: at first, and at most."""
        return [(nodes, max(1, levels)) for nodes, levels in self.policy.room()]

    def _aux_layers(self) -> list[int]:
        """Return the target's layers whose hidden states are needed."""
        return sorted({*self.decoder.aux_layers, *self.policy.hidden_layers(self.decoder.target.layers)})


class Sessions:
    """A session of the target and one of each draft, in which rows have been read; ready for a step.

    Args:
        openings: how to open them.
        rows: the sequences.

    Attributes:
        target, drafts: the sessions.
        states: per row, the target's auxiliary hidden states at the tokens before the root, before the first step.
        policy: how trees grow in this batch.
    """

    def __init__(self, openings: Openings, rows: Sequence[Row]) -> None:
        decoder, self._openings = openings.decoder, openings
        self.target, self.states = openings.target(rows)
        self.drafts = [openings.draft(number, rows, self.states) for number in range(len(decoder.drafts))]
        coupled = openings.coupled(rows)
        self.policy = openings.policy = openings.policy.begin(
            len(self.drafts), coupled, len(rows), self.target.run.packs
        )

    def join(self, rows: Sequence[Row]) -> None:
        """Let rows join, with what was read of their prompts; all that it takes is prefill time."""
        started, before = perf_counter(), self._prefill_seconds
        others, states = self._openings.target(rows, joining=True)
        for draft in self.drafts:
            if any(others.unread) and others.aux_layers:  # not all states are known yet
                draft.late = rows, states
            else:
                draft.join(draft.open(rows, states))
        self.target.join(others)
        self.target.prefill_seconds += perf_counter() - started - (self._prefill_seconds - before)

    @property
    def _prefill_seconds(self) -> float:
        return self.target.prefill_seconds + sum(draft.prefill_seconds for draft in self.drafts)


def _end(rows: Sequence[Row]) -> int:
    """Return how many tokens a row has at most."""
    return max(len(row.ids) for row in rows) + max(row.remaining for row in rows)
