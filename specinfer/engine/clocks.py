"""What decoding takes: clocks over the sessions of a batch, and what they show.

Knows: sessions, their passes and seconds.  Does not know: which rows are decoded, how.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import perf_counter

import torch

from specinfer.attention import TreeSession
from specinfer.common.tensors import concat
from specinfer.engine.draft import Clocked, DraftSession, Scored
from specinfer.engine.sequence import Row
from specinfer.results import Seconds
from specinfer.tree import Forest, Policy

States = Sequence[torch.Tensor | None]  # per row, the target's auxiliary hidden states (n, K, H)


@dataclass
class Timed(Clocked):
    """A draft's session with a clock: seconds in its proposals (passes, look-ups, growing) without prefill.

    Rows whose prompts a pass reads beside the trees of others join after that pass.
    """

    session: DraftSession
    open: Callable[[Sequence[Row], States], DraftSession]  # a session of other rows, from states before their roots
    proposing: float = 0.0  # seconds
    late: Sequence[Row] = ()  # those rows, the last ones of the batch ...
    read: States = ()  # ... and states at the tokens that were read before

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Propose as the session does."""
        started = perf_counter() - self.prefill_seconds
        try:
            return self.session.propose(policy, roots, max_depth)
        finally:
            self.proposing += perf_counter() - self.prefill_seconds - started

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[torch.Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Commit as the session does, and let late rows join it."""
        known, late, read = len(tokens) - len(self.late), self.late, self.read
        self.session.commit(tokens[:known], states[:known], scored[:known])
        self.late = self.read = ()
        found = zip(late, read, states[known:], strict=True)
        joining = [(row, before, new) for row, before, new in found if not row.finished]
        if joining:
            rows, *parts = zip(*joining, strict=True)
            self.session.join(self.open(rows, [concat(states) for states in zip(*parts, strict=True)]))


@dataclass(frozen=True)
class Reading:
    """What was spent until a moment, or between two."""

    seconds: Seconds = field(default_factory=Seconds)
    passes: int = 0  # of the target, those that read prompts excluded
    drafting: tuple[tuple[int, float], ...] = ()  # per draft, its passes and the seconds in its proposals

    def __sub__(self, earlier: "Reading") -> "Reading":
        """Return what was spent since an earlier reading of the same clocks."""
        pairs = zip_longest(self.drafting, earlier.drafting, fillvalue=(0, 0.0))
        drafting = tuple((passes - before, spent - then) for (passes, spent), (before, then) in pairs)
        return Reading(self.seconds - earlier.seconds, self.passes - earlier.passes, drafting)


class Clocks:
    """The clocks of a batch.  They run while it is decoded, and stand still between two steps.

    Attributes:
        now: the newest reading.
    """

    def __init__(self) -> None:
        self.now = Reading()
        self.resume()

    def resume(self) -> None:
        """Go on: the time since the newest reading was the caller's."""
        self.started = perf_counter()

    def read(self, target: TreeSession, drafts: Sequence[Timed]) -> Reading:
        """Return what was spent since the newest reading; this one takes its place."""
        before, started = self.now, self.started
        self.resume()
        seconds = Seconds(
            total=before.seconds.total + self.started - started,
            prefill=target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts),
            target=target.seconds,
            draft=sum(draft.seconds for draft in drafts),
        )
        self.now = Reading(seconds, target.passes, tuple((draft.passes, draft.proposing) for draft in drafts))
        return self.now - before

    def learnt(self) -> None:
        """Take the time since `resume` for what drafts learn at the end."""
        spent, seconds = perf_counter() - self.started, self.now.seconds
        self.now = replace(self.now, seconds=replace(seconds, total=seconds.total + spent, learning=spent))
